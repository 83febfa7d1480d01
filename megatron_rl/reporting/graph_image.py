"""The precision graph of a run as a part of its page. graph.svg comes from a disk, so only what `draw_svg` writes passes."""

import re
from pathlib import Path
from xml.etree import ElementTree

from megatron_rl.config.reading import READ_ERRORS, describe_read_error, read_file

_NAMESPACE = "http://www.w3.org/2000/svg"
_TAGS = {f"{{{_NAMESPACE}}}{name}" for name in ("svg", "style", "defs", "clipPath", "rect", "g", "text", "tspan")}
_PLAIN = {"viewBox", "width", "height", "x", "y", "textLength", "lengthAdjust", "fill", "shape-rendering", "transform"}
_NAMED = re.compile(r"precision-graph[\w-]*( precision-graph[\w-]*)*")
_LINK = re.compile(r"url\(#precision-graph[\w-]*\)")
_PROPERTIES = {"font-family", "font-size", "font-weight", "font-style", "line-height", "fill", "text-decoration"}
_VALUE = re.compile(r"[\w#. -]+")
_MOST_BYTES = 16 << 20


def read_graph(path: Path) -> tuple[str, str]:
    """Return the graph as an inline `<svg>` element, and a warning. Either is empty."""
    try:
        text = read_file(path, _MOST_BYTES).decode()
        if "<!" in text:  # entities can grow without bound
            raise ValueError("it has a declaration")
        root = ElementTree.fromstring(text)
        if root.tag != f"{{{_NAMESPACE}}}svg":
            raise ValueError("it is not an SVG file")
        for element in root.iter():
            _check(element)
        ElementTree.register_namespace("", _NAMESPACE)
        return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False), ""  # without comments, in one spelling
    except FileNotFoundError:
        return "", ""
    except ElementTree.ParseError as error:
        return "", f"{path.name} was left out: it is not an SVG file ({error})"
    except READ_ERRORS as error:
        return "", f"{path.name} was left out: {describe_read_error(error)}"


def _check(element: ElementTree.Element) -> None:
    """Raise ValueError if an element could do more than show the graph."""
    if element.tag not in _TAGS:
        raise ValueError(f"it has an element {element.tag!r:.80}")
    if element.tag.endswith("}style") and not _is_plain_style(element.text or ""):
        raise ValueError("its style has more than the graph needs")
    for name, value in element.attrib.items():
        allowed = _LINK.fullmatch(value) if name == "clip-path" else _NAMED.fullmatch(value) if name in ("id", "class") else name in _PLAIN
        if not allowed or (name in _PLAIN and ("(" in value and name != "transform")):
            raise ValueError(f"it has an attribute {name!r:.80}")


def _is_plain_style(text: str) -> bool:
    """Return whether all rules are for elements of the graph alone, and change only the look of text."""
    *rules, rest = text.split("}")
    for rule in rules:
        selector, _, body = (part.strip() for part in rule.partition("{"))
        pairs = [declaration.partition(":") for declaration in body.split(";") if declaration.strip()]
        if selector[:1] != "." or not _NAMED.fullmatch(selector[1:]):
            return False
        if not all(name.strip() in _PROPERTIES and _VALUE.fullmatch(value.strip()) for name, _, value in pairs):
            return False
    return not rest.strip()
