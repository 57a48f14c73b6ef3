"""A report as Markdown and as one HTML file, from the same blocks."""

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from esper.evaluation.statistics import Estimate
from esper.files import write_file

DPI = 110
NUMERIC = re.compile(r"[-+\d.,x\[\] ]*")  # numbers, factors, intervals, or an empty cell


@dataclass(frozen=True)
class Paragraph:
    """A paragraph with `code` and **bold** as in Markdown."""

    text: str


@dataclass(frozen=True)
class ReportTable:
    """A table; numeric columns are aligned to the right, others to the left."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric_columns(self) -> list[bool]:
        """For each column, whether all its cells are numeric."""
        return [all(NUMERIC.fullmatch(row[column]) for row in self.rows) for column in range(len(self.header))]


@dataclass(frozen=True)
class ReportFigure:
    """A plot with its caption."""

    name: str  # of its file
    figure: Figure
    caption: str


@dataclass(frozen=True)
class CodeBlock:
    """Shell commands."""

    lines: Sequence[str]


Block = Paragraph | ReportTable | ReportFigure | CodeBlock


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; margin: 1em 0 }
th, td { padding: .25em .7em; text-align: left; border-bottom: 1px solid #eee; vertical-align: top }
th { border-bottom: 2px solid #999 } .number { text-align: right; white-space: nowrap }
img { max-width: 100% } figure { margin: 1em 0 } figcaption { color: #555; font-size: 13px }
pre { background: #f6f6f6; padding: .7em; overflow-x: auto; font-size: 13px } code { background: #f6f6f6 }
"""


def write_report(directory: Path, title: str, sections: Sequence[Section]) -> list[Path]:
    """Write report.md with its plots in pictures/, and report.html with its plots embedded; returns both files."""
    images = {
        block.name: _to_png(block.figure) for s in sections for block in s.blocks if isinstance(block, ReportFigure)
    }
    for name, content in images.items():
        write_file(directory / "pictures" / f"{name}.png", content)
    texts = {"report.md": _to_markdown(title, sections), "report.html": _to_html(title, sections, images)}
    for name, text in texts.items():
        write_file(directory / name, text)
    return [directory / name for name in texts]


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _to_markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            match block:
                case Paragraph(text):
                    parts.append(text)
                case CodeBlock(lines):
                    parts.append("\n".join(["```sh", *lines, "```"]))
                case ReportFigure(name, _, caption):
                    parts.append(f"![{name}](pictures/{name}.png)\n\n{caption}")
                case ReportTable(header, rows):
                    ruler = ["---:" if is_numeric else "---" for is_numeric in block.numeric_columns]
                    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, ruler, *rows)]
                    parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
    return "\n\n".join(parts) + "\n"


def _to_html(title: str, sections: Sequence[Section], images: dict[str, bytes]) -> str:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [_block_to_html(block, images) for block in section.blocks]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(parts)}\n</body></html>\n'


def _block_to_html(block: Block, images: dict[str, bytes]) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_inline_to_html(text)}</p>"
        case CodeBlock(lines):
            return f"<pre>{html.escape(chr(10).join(lines))}</pre>"
        case ReportFigure(name, _, caption):
            data = base64.b64encode(images[name]).decode()
            image = f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
            return f"<figure>{image}<figcaption>{_inline_to_html(caption)}</figcaption></figure>"
        case ReportTable(header, rows):
            classes = [' class="number"' if is_numeric else "" for is_numeric in block.numeric_columns]
            top, *body = (
                "".join(f"<{tag}{css}>{_inline_to_html(cell)}</{tag}>" for css, cell in zip(classes, row, strict=True))
                for tag, row in [("th", header), *(("td", row) for row in rows)]
            )
            lines = "\n".join(f"<tr>{row}</tr>" for row in body)
            return f"<table><thead><tr>{top}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def _inline_to_html(text: str) -> str:
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)


def format_interval(estimate: Estimate | None, form: str = "{:.2f}") -> str:
    """An estimate with its interval as text; a dash if it is None."""
    if estimate is None:
        return "-"
    return f"{form.format(estimate.value)} [{form.format(estimate.low)}, {form.format(estimate.high)}]"
