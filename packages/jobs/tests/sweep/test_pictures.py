"""The pictures of a sweep."""

from coalign_jobs.sweep import pictures
from tests.report.test_plots import list_ticks


def test_settings_of_a_sweep_have_no_exponent_either(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure))
    trials = {
        "lr": [(1e-6, 1e-7), (2e-6, 2e-7)],
        "loss.fn": [("dpo", 1e9), ("ipo", 2e9)],
        "seed": [(1, 1.0), (99, 2.0)],
    }
    pictures.plot_settings(trials, "eval/loss/value", tmp_path / "settings.png")
    exponent, ticks = list_ticks(figures[0])
    assert exponent == "" and ticks[2] == ["dpo", "ipo"]  # names stay names
