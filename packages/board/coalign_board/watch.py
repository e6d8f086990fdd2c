"""The screen of `coalign watch`: a run in a terminal, for people on a login node. run_view.py says what is on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.widgets import DataTable, Footer, Input, RichLog, Static, TabbedContent, TabPane
from textual_plotext import PlotextPlot

from coalign.report.plots import Curve, CurvePlot
from coalign.run_files.metric_table import describe_metric
from coalign_board.questions import find_question
from coalign_board.run_view import RunView, describe_sample

REFRESH_SECONDS = 1.0
PLOTS_SHOWN = 4
SAMPLES_SHOWN = 50
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines
_COLUMNS = ("metric", "last", "step before", "first")


class WatchScreen(App[None]):
    """Shows a run folder and follows its files."""

    TITLE = "coalign watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #table { height: 1fr; }
    #state, #step, #goodput, #meaning { height: auto; padding: 0 1; }
    #pages, ContentSwitcher, TabPane { height: 1fr; }
    TabPane { padding: 0 1; }
    #state { text-style: bold; }
    #plots { grid-size: 2 2; grid-gutter: 0 1; }
    #search { display: none; height: 3; }
    #search.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "show_page('curves')", "Curves"),
        Binding("m", "show_page('metrics')", "Metrics"),
        Binding("s", "show_page('samples')", "Samples"),
        Binding("l", "show_page('log')", "Log"),
        Binding("n", "turn_plots", "Next curves"),
        Binding("slash", "search", "Search samples"),
        Binding("escape", "end_search", "End search"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, view: RunView) -> None:
        super().__init__()
        self.view = view
        self._first_plot = 0
        self._is_searching = False

    def compose(self) -> ComposeResult:
        yield Static(id="state", markup=False)
        yield Static(id="step", markup=False)
        yield Static(id="goodput", markup=False)
        with TabbedContent(id="pages"):
            with TabPane("Curves", id="curves"), Grid(id="plots"):
                for number in range(PLOTS_SHOWN):
                    yield PlotextPlot(id=f"plot{number}")
            with TabPane("Metrics", id="metrics"):
                yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
                yield Static(id="meaning", markup=False)
            with TabPane("Samples", id="samples"):
                yield Input(placeholder="text of prompts and responses, or `step 12`", id="search")
                with VerticalScroll(id="scroll"):
                    yield Static(id="shown", markup=False)
            with TabPane("Log", id="log"):
                yield RichLog(id="lines", markup=False, highlight=False, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#table", DataTable).add_columns(*_COLUMNS)
        self._show_all({"metrics", "samples", "log"})
        self.set_interval(REFRESH_SECONDS, self.follow)

    def follow(self) -> None:
        """Read what the run has written, and show it. A disk that is away for a while is no end."""
        try:
            self._show_all(self.view.update())
        except OSError as problem:
            self.query_one("#state", Static).update(f"{self.view.folder} · {problem}")

    # ---- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key does anything now."""
        return action != "end_search" or self._is_searching

    def action_show_page(self, page: str) -> None:
        self.query_one("#pages", TabbedContent).active = page
        focus = {"metrics": "#table", "samples": "#scroll", "log": "#lines"}.get(page)
        if focus:
            self.query_one(focus).focus()

    def action_turn_plots(self) -> None:
        self.action_show_page("curves")
        self._first_plot += PLOTS_SHOWN
        self._show_plots()

    def action_search(self) -> None:
        self.action_show_page("samples")
        self._open_search(True)
        self.query_one("#search").focus()

    def action_end_search(self) -> None:
        self._open_search(False)
        self.query_one("#search", Input).value = ""
        self.query_one("#scroll").focus()

    def _open_search(self, is_open: bool) -> None:
        self._is_searching = is_open
        self.query_one("#search").set_class(is_open, "open")
        self.refresh_bindings()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._show_samples()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.query_one("#scroll").focus()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Say below the table what the metric under the cursor means."""
        name = event.data_table.get_row_at(event.cursor_row)[0] if event.data_table.row_count else ""
        self.query_one("#meaning", Static).update((describe_metric(name) or {"en": ""})["en"])

    # ---- pages -----------------------------------------------------------------------------------------------------

    def _show_all(self, changed: set[str]) -> None:
        self.query_one("#state", Static).update(f"{self.view.folder} · {self.view.describe_state()}")
        if "metrics" in changed:
            self.query_one("#step", Static).update(self.view.format_step())
            self.query_one("#goodput", Static).update(self.view.format_goodput())
            self._show_plots()
            self._show_metrics()
        if "samples" in changed:
            self._show_samples()
        if "log" in changed:
            self._show_log()

    def _show_plots(self) -> None:
        plots = self.view.list_plots()
        self._first_plot = self._first_plot if self._first_plot < len(plots) else 0
        shown = plots[self._first_plot : self._first_plot + PLOTS_SHOWN]
        for number in range(PLOTS_SHOWN):
            widget = self.query_one(f"#plot{number}", PlotextPlot)
            widget.visible = number < len(shown)
            if widget.visible:
                draw_plot(widget, *shown[number])

    def _show_metrics(self) -> None:
        table = self.query_one("#table", DataTable)
        row, scroll = table.cursor_row, table.scroll_y
        table.clear()
        for metric in self.view.list_metrics():
            table.add_row(metric.name, metric.last, metric.previous, metric.first)
        table.move_cursor(row=row, scroll=False)
        table.scroll_to(y=scroll, animate=False)

    def _show_samples(self) -> None:
        samples = list(self.view.find_samples(self.query_one("#search", Input).value))
        count = f"{len(samples)} sample{'s' if len(samples) > 1 else ''}, the newest first" if samples else "no samples"
        text = Text(f"{count}\n", style="dim")
        for sample in samples[:SAMPLES_SHOWN]:
            text.append_text(format_sample(sample))
        self.query_one("#shown", Static).update(text)

    def _show_log(self) -> None:
        lines = self.query_one("#lines", RichLog)
        is_at_end, position = lines.is_vertical_scroll_end, lines.scroll_y
        lines.clear()
        for line in self.view.log.values:
            lines.write(Text(hide_controls(line)), scroll_end=is_at_end)
        if not is_at_end:
            lines.scroll_to(y=position, animate=False)


def draw_plot(widget: PlotextPlot, plot: CurvePlot, curves: Mapping[str, Curve]) -> None:
    """Draw the curves of one picture."""
    widget.plt.clear_data()
    widget.plt.title(f"{plot.title} ({plot.unit})" if plot.unit else plot.title)
    for name, curve in curves.items():
        steps, values = zip(*curve, strict=True)
        label = name if len(curves) > 1 else None
        widget.plt.plot(list(steps), list(values), marker="braille", label=label)
    widget.refresh()


def format_sample(sample: Mapping[str, Any]) -> Text:
    """Return a sample as text: its heading, the user's last turn, and the response."""
    question, response = (
        hide_controls(text).strip() for text in (find_question(sample), str(sample.get("response", "")))
    )
    text = Text(f"\n{describe_sample(sample)}\n", style="bold")
    return text.append(f"{question}\n", style="dim").append(f"{response or '(empty)'}\n")


def hide_controls(text: str) -> str:
    """Replace control characters, which a terminal would obey: a policy of random weights writes any of them."""
    return _CONTROLS.sub("\ufffd", text)


def watch_run(folder: Path) -> None:
    """Show a run folder until the user quits. Raises FileNotFoundError and ValueError if it is none."""
    view = RunView(folder)
    view.update()
    WatchScreen(view).run()
