"""One self-contained HTML page out of the documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dcut_server.report_page.documents import Document
from dcut_server.report_page.drafts import BARS_HEIGHT, BARS_WIDTH
from dcut_server.report_page.views import document_view

TEMPLATES = Path(__file__).parent / "templates"


def render_page(documents: Sequence[Document], facts: Sequence[tuple[str, str]]) -> str:
    """facts: name and value of what the page itself was made with."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    views = [document_view(document) for document in documents]
    bars = {"width": BARS_WIDTH, "height": BARS_HEIGHT}
    return environment.get_template("page.html").render(views=views, facts=facts, bars=bars)
