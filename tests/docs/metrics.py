"""Writes docs/metrics.md and docs/zh/metrics.md from coalign/run_files/metrics.yaml: `python -m tests.docs.metrics`."""

from __future__ import annotations

from itertools import groupby

from coalign.files import write_text_atomically
from coalign.run_files.metric_table import _MetricEntry, _read_entries
from tests.runs import ROOT

PAGES = {"en": ROOT / "docs" / "metrics.md", "zh": ROOT / "docs" / "zh" / "metrics.md"}
HEADS = {"en": ("metric", "unit", "meaning"), "zh": ("指标", "单位", "含义")}
INTRODUCTIONS = {
    "en": """\
# Metrics

What the lines of `metrics.jsonl` hold. The [board](board.md) says the same where you point at the name of a curve.
`python -m tests.docs.metrics` writes this page from `coalign/run_files/metrics.yaml`.

A run logs those that its recipe and its settings have. `<word>` stands for a name. Three things may stand before one:

- `eval/`: the same of an evaluation, such as `eval/loss/value`.
- `eval/<source>/`: the same of one source of the evaluation data, where there are several.
- `<model>/`: the same of another model that learns, such as `value/loss/grad_norm`.

Reward functions, losses, environments and hooks of your own add theirs.
""",
    "zh": """\
# 指标

`metrics.jsonl` 各行的内容。在[看板](board.md)上指向曲线的名称，会显示同样的说明。
`python -m tests.docs.metrics` 根据 `coalign/run_files/metrics.yaml` 写出本页。

一次运行记录其配方和设置所具有的指标。`<word>` 代表一个名称。指标之前可以有三种前缀：

- `eval/`：评测的同一指标，例如 `eval/loss/value`。
- `eval/<source>/`：有多个来源时，评测数据中一个来源的同一指标。
- `<model>/`：另一个参与学习的模型的同一指标，例如 `value/loss/grad_norm`。

你自己的奖励函数、损失、环境和 hook 会加入各自的指标。
""",
}


def render_page(language: str) -> str:
    """Return the page in a language: an introduction, and a table for each group."""
    sections = [INTRODUCTIONS[language]]
    for title, entries in groupby(_read_entries(), key=lambda entry: entry.title[language]):
        sections.append(f"## {title}\n\n{_render_table(list(entries), language)}")
    return "\n".join(sections)


def _render_table(entries: list[_MetricEntry], language: str) -> str:
    rows = [HEADS[language], *((f"`{it.name}`", it.unit[language], it.meaning[language]) for it in entries)]
    head, *body = [f"| {' | '.join(row)} |\n" for row in rows]
    return head + "|---|---|---|\n" + "".join(body)


if __name__ == "__main__":
    for language, page in PAGES.items():
        write_text_atomically(page, render_page(language))
