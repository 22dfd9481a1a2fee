"""How ``--help`` shows defaults."""

from __future__ import annotations

import argparse
from typing import Optional

__all__ = ["HelpFormatter"]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each default that is a value; options without one say themselves what happens then."""

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        return action.help if action.default is None else super()._get_help_string(action)
