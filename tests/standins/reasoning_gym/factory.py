"""The stand-in's registry, and its task."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass
class ChainSumConfig:
    min_terms: int = 2
    max_terms: int = 6
    seed: int | None = None
    size: int = 500

    def __post_init__(self) -> None:
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class ChainSum:
    def __init__(self, config: ChainSumConfig) -> None:
        assert config.seed is not None  # without one every process would make other rows
        self.config, self.seed = config, config.seed

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed + index)
        terms = [rng.randint(0, 99) for _ in range(rng.randint(self.config.min_terms, self.config.max_terms))]
        # A tuple in the metadata, which JSON would make a list of.
        found = {"source_index": index, "terms": tuple(terms)}
        return {"question": "+".join(map(str, terms)) + "=?", "answer": str(sum(terms)), "metadata": found}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        assert isinstance(entry["metadata"]["terms"], tuple)
        if answer is None:
            return 0.0
        return 1.0 if answer == entry["answer"] else 0.01


DATASETS = {"chain_sum": (ChainSum, ChainSumConfig)}
