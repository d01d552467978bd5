"""A self-contained HTML page: elements whose text is escaped, style sheet, tables. No network, no script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

from springtide.core.quantities import format_duration

Element = ElementTree.Element
Content = Element | str
Row = Sequence[Content]

NUM_SERIES = 12
UNKNOWN = "\N{EN DASH}"
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# Hues that also differ in lightness, so that readers who do not see red and green can tell neighbours apart.
_LIGHT = (
    *("#0b6e8f", "#c2410c", "#6d28d9", "#15803d", "#b91c6b", "#8a6a00"),
    *("#475569", "#1d4ed8", "#9f1239", "#0f766e", "#7c5a3a", "#404040"),
)
_DARK = (
    *("#5cc3e4", "#fb923c", "#b79bf5", "#6fd08c", "#f38bc0", "#e3c04f"),
    *("#a9b6c4", "#8ab0ff", "#ff8fa0", "#58d0c0", "#cfa985", "#d0d0d0"),
)
_DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")


def element(tag: str, *children: Content, **attributes: object) -> Element:
    """Build an element. `class_` is class, `stroke_width` stroke-width; None leaves an attribute out.

    Text is escaped when the page is written, so names in a trace cannot become markup.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), clean(str(value)))
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + clean(child)
        else:
            made.text = (made.text or "") + clean(child)
    return made


def clean(text: str) -> str:
    """Return `text` with the characters that HTML does not allow shown as U+FFFD."""
    return _FORBIDDEN.sub("�", text)


def document(title: str, *content: Content) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style_sheet()),
    )
    page = element("html", head, element("body", *content), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(page, encoding="unicode", method="html") + "\n"


def write(path: Path, text: str) -> None:
    """Write a page so that a reader never sees half of it. Raises OSError."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def section(title: str, *content: Content, note: str = "") -> Element:
    """A panel with a heading and a line that says how to read it."""
    head: list[Content] = [element("h2", title)]
    if note:
        head.append(element("p", note, class_="note"))
    return element("section", *head, *content, class_="panel")


def facts(pairs: Sequence[tuple[str, Content]]) -> Element:
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs), class_="facts"
    )


def table(header: Row, rows: Sequence[Row], *, caption: str, row_class: str = "", column_class: str = "") -> Element:
    """A table whose first column names the row and whose other columns hold numbers.

    A `{}` in `row_class` or `column_class` is filled with the index of the row, or of the column behind the first.
    """
    classes = [None, *(column_class.format(index) or None for index in range(len(header) - 1))]
    head = element(
        "tr", *(element("th", title, scope="col", class_=name) for title, name in zip(header, classes, strict=True))
    )
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_=name) for cell, name in zip(row[1:], classes[1:], strict=True)),
            class_=row_class.format(index) or None,
        )
        for index, row in enumerate(rows)
    ]
    made = element(
        "table", element("caption", caption, class_="unseen"), element("thead", head), element("tbody", *body)
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def swatch(slot: int) -> Element:
    """A sample of a series' line, for keys and tables."""
    line = element("line", x1=1, x2=27, y1=6, y2=6, class_=f"line s{slot % NUM_SERIES}")
    return element("svg", line, viewBox="0 0 28 12", width=28, height=12, aria_hidden="true")


def switches(names: Mapping[int, str]) -> Element:
    """A check box for each series by its slot; unchecked, every chart and table hides the series, without script."""
    boxes = [
        element(
            "label",
            element("input", type="checkbox", checked="checked", id=f"show-{slot}", autocomplete="off"),
            swatch(slot),
            name,
            class_=f"key-{slot}",
        )
        for slot, name in names.items()
    ]
    return element("fieldset", element("legend", "Shown"), *boxes, class_="switches")


def fraction(value: float | None, digits: int = 1) -> str:
    """93.8 %, or a dash."""
    return UNKNOWN if value is None else f"{value * 100:.{digits}f} %"


def seconds(value: float | None) -> str:
    """5h15, 3d04h, or a dash."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0 s"
    if value < 2 * 86400:
        return format_duration(value)
    days, rest = divmod(round(value / 3600), 24)
    return f"{days}d{rest:02d}h"


def figure(value: float | None, digits: int = 3) -> str:
    """A few significant digits with thousands apart, or a dash."""
    if value is None:
        return UNKNOWN
    if float(value).is_integer() or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def style_sheet() -> str:
    """The style of every page: light and dark follow the reader's system."""
    sheet = resources.files("springtide.simulator.report").joinpath("page.css").read_text(encoding="utf-8")
    light = " ".join(f"--s{slot}: {hue};" for slot, hue in enumerate(_LIGHT))
    dark = " ".join(f"--s{slot}: {hue};" for slot, hue in enumerate(_DARK))
    series = "\n".join(
        f".line.s{slot} {{ stroke: var(--s{slot}); stroke-dasharray: {_DASHES[slot % len(_DASHES)]}; }} "
        f".area.s{slot}, .bar.s{slot} {{ fill: var(--s{slot}); }} "
        f"body:has(#show-{slot}:not(:checked)) .of-{slot} {{ display: none; }} "
        f"body:has(.switches .key-{slot}:hover) .chart .line:not(.s{slot}) {{ opacity: 0.15; }}"
        for slot in range(NUM_SERIES)
    )
    return sheet.replace("/* light series */", light).replace("/* dark series */", dark) + series + "\n"
