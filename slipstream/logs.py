"""One compact log format for every process of ours: our progress at INFO, other libraries only when they warn."""

from __future__ import annotations

import logging
import warnings


def configure() -> None:
    """Show our progress on standard error. Safe to call again."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger("slipstream")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for name in ("mlflow", "alembic", "httpx", "datasets", "speculators", "megatron", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron|apex|flytekit")
