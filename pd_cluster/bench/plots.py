"""Pictures of curves. matplotlib is imported here alone, when something is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import ConfigError

if TYPE_CHECKING:
    from pd_cluster.bench.curves import Curve

MEASURED, LINE = "#1f6f8b", "#c26a2d"


def draw(curve: "Curve", path: Path) -> Path:
    """A PNG of what was measured and of the straight line in its work that fits best."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}): pip install 'pd-cluster[bench]'") from error
    found = curve.growth
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fitted = [found.fixed + found.price * work for work in curve.work]
    axes.plot(curve.x, fitted, color=LINE, linewidth=1, label="linear in the work")
    axes.plot(curve.x, curve.cost, "o-", color=MEASURED, markersize=4, linewidth=1, label="measured")
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.cost_label)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{curve.name.replace('_', ' ')}: {found.verdict} (exponent {found.exponent:.2f})", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    return path
