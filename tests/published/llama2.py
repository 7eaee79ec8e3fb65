"""Llama-2 7B's forward time over b (PKU-DAIR/Hetu-Galvatron), each from a fit to the others."""

from pptune.curves import fit_curve
from tests.published.solving import Prediction, rows


def llama2_7b_forward() -> list[Prediction]:
    """Forward times at micro-batch sizes 1 to 12, each from a curve through the others."""
    found = []
    for num_layers in ("2", "4"):
        times = {
            int(row["microbatch_size"]): float(row["forward_ms"]) / 1e3
            for row in rows("llama2_7b_forward")
            if row["num_layers"] == num_layers
        }
        for b, measured_s in times.items():
            others = {size: seconds for size, seconds in times.items() if size != b}
            fit = fit_curve(list(others), list(others.values()))
            label = f"{num_layers} layers b{b}"
            found.append(Prediction(label=label, predicted_s=fit.seconds(b), measured_s=measured_s))
    return found
