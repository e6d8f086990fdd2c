"""The pages of metrics are those that are written from the table."""

from __future__ import annotations

import pytest

from tests.docs.metrics import PAGES, render_page


@pytest.mark.parametrize("language", PAGES)
def test_the_page_is_written_from_the_table(language):
    assert PAGES[language].read_text(encoding="utf-8") == render_page(language), "run python -m tests.docs.metrics"
