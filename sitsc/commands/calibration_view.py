"""A calibration for people: what was fitted, and how far the model is off at every point."""

from sitsc.commands.output import table_lines
from sitsc.core.calibration import Calibration


def lines(made: Calibration) -> list[str]:
    """Parameters with their sources, residuals, and the errors of points that were not fitted."""
    parameters = [
        (name, item.source, f"{item.value:.4g}", item.unit)
        for name, item in sorted(made.parameters.items())
    ]
    residuals = [
        (
            r.model,
            r.point,
            f"{r.measured_ms:.3f}",
            f"{r.predicted_ms:.3f}",
            f"{100 * r.error:+.1f} %",
            "fitted" if r.fitted else "",
        )
        for r in made.residuals
    ]
    header = ("model", "point", "measured ms", "predicted ms", "error", "")
    return [
        *table_lines([("parameter", "from", "value", "unit"), *parameters], left=2),
        "",
        *table_lines([header, *residuals], left=2),
        "",
        f"median {100 * made.median_error:.1f} %, worst {100 * made.worst_error:.1f} %"
        " of the points that were not fitted",
    ]
