"""The records of a projection, as plain figures. All of it is projected but for fields whose names say measured."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.simulator.fit.ensemble import Ensemble
from slipstream.simulator.fit.observed import CheckRecord
from slipstream.simulator.project.figures import ProjectedFigures
from slipstream.simulator.project.projection import ProjectedPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPoint:
    """The paper's own projection, and ours beside it: on an ideal stack, and as calibrated on its measurements."""

    published_rollout_speedup: float
    published_step_speedup: float
    ideal: ProjectedPoint
    calibrated: ProjectedPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedProjection:
    """What a request gives, and what of its layout is assumed."""

    ideal: ProjectedPoint
    calibrated: ProjectedPoint
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRecord:
    """One structural variant of a calibration. Errors are relative."""

    regime: str
    weight: float
    num_parameters: int
    effective_parameters: float
    rms_error: float
    max_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCell:
    """A measured generation time and the ensemble's."""

    label: str
    measured_s: float
    simulated_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """How well one set of measurements was fitted."""

    source: str
    variants: tuple[VariantRecord, ...]
    cells: tuple[FittedCell, ...]

    @staticmethod
    def of(source: str, ensemble: Ensemble) -> CalibrationRecord:
        """Variants and cells of a calibration, as plain figures."""
        cells, weights = ensemble.best.cells, ensemble.weights.tolist()
        return CalibrationRecord(
            source=source,
            variants=tuple(
                VariantRecord(
                    regime=member.variant.regime.value,
                    weight=weight,
                    num_parameters=len(member.variant.free),
                    effective_parameters=member.effective_parameters,
                    rms_error=member.rms_error,
                    max_error=member.max_error,
                )
                for member, weight in zip(ensemble.members, weights, strict=True)
            ),
            cells=tuple(
                FittedCell(label=cell.label, measured_s=cell.generation_s, simulated_s=seconds)
                for cell, seconds in zip(cells, ensemble.predict_s(cells).tolist(), strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """What `project_speedup` hands to the report."""

    run_calibration: CalibrationRecord | None  # None: the recipe does not say on what it ran
    run_check: CheckRecord | None  # None: no speculative arm with k > 0, or no calibration
    from_run: tuple[ProjectedPoint, ...]  # the run's machine, every k of its sweep
    paper_calibration: CalibrationRecord
    from_paper: tuple[PublishedPoint, ...]
    figures: ProjectedFigures
