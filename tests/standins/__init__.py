"""Directory of modules that stand in for optional packages; a test puts it first on the path."""

from pathlib import Path

STANDINS = Path(__file__).parent
