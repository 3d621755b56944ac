"""Does what proposes tokens fit this policy? Asked by every stage that is about to start an engine."""

from __future__ import annotations

from pathlib import Path

from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.draft_model import check_draft_model
from slipstream.drafts.methods import DraftMethod, require_package
from slipstream.drafts.mtp import check_mtp


def require_fit(config: DraftConfig, policy: Path, draft: Path | None, *, max_model_len: int) -> None:
    """Refuse a draft that vLLM would load wrongly, or late.

    Args:
        draft: directory of the draft; None where the method has no weights of its own.
    Raises:
        ConfigError: see `check_draft`, `check_mtp` and `check_draft_model`; or the method's package is not installed.
    """
    require_package(config.method)
    match config.method:
        case DraftMethod.EAGLE3:
            assert draft is not None
            check_draft(policy, draft, max_model_len=max_model_len)
        case DraftMethod.MTP:
            assert draft is not None
            check_mtp(policy, draft)
        case DraftMethod.DRAFT_MODEL:
            assert draft is not None
            check_draft_model(policy, draft, max_model_len=max_model_len)
        case _:
            pass  # nothing is loaded
