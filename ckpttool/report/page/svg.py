"""Pictures as trees that a page can build without parsing anything: only shapes and text get through."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

ELEMENTS = frozenset(
    re.findall(
        r"\S+",
        """
        svg g defs pattern clipPath title desc rect circle ellipse line path polygon polyline text tspan
        linearGradient stop
        """,
    )
)
ATTRIBUTES = frozenset(
    re.findall(
        r"\S+",
        """
        x y x1 x2 y1 y2 cx cy r rx ry d dx dy width height points viewBox transform preserveAspectRatio id class role
        fill fill-opacity fill-rule stroke stroke-width stroke-dasharray stroke-linecap stroke-linejoin stroke-opacity
        opacity font-family font-size font-weight font-style text-anchor dominant-baseline letter-spacing
        patternUnits patternTransform patternContentUnits clip-path clipPathUnits clip-rule offset stop-color
        gradientUnits gradientTransform textLength lengthAdjust xml:space aria-hidden aria-label aria-labelledby
        shape-rendering vector-effect visibility
        """,
    )
)
_SPACES = {"{http://www.w3.org/2000/svg}": "", "{http://www.w3.org/XML/1998/namespace}": "xml:"}
_OWN = re.compile(r"url\(#([A-Za-z0-9_-]+)\)")


def tree(svg: str, prefix: str) -> list[Any]:
    """``[element, attributes, children]``; a child is such a list or text. ``prefix`` sets its ids apart from others'.

    Raises ValueError for what is neither a shape nor text, or refers to something outside.
    """
    return _node(ET.fromstring(svg), prefix)  # noqa: S314  (made by this package; no entities in it)


def _node(element: ET.Element, prefix: str) -> list[Any]:
    name = _plain(element.tag)
    if name not in ELEMENTS:
        raise ValueError(f"a picture in a page may not have <{name}>")
    attributes = {}
    for key, value in element.attrib.items():
        attributes[_plain(key)] = _attribute(_plain(key), value, prefix)
    children: list[Any] = [element.text] if element.text and element.text.strip() else []
    for child in element:
        children.append(_node(child, prefix))
        if child.tail and child.tail.strip():
            children.append(child.tail)
    return [name, attributes, children]


def _plain(name: str) -> str:
    for space, short in _SPACES.items():
        name = name.replace(space, short)
    return name


def _attribute(name: str, value: str, prefix: str) -> str:
    if name not in ATTRIBUTES:
        raise ValueError(f"a picture in a page may not have the attribute {name}")
    if name == "id":
        return prefix + value
    if name == "aria-labelledby":
        return " ".join([prefix + word for word in value.split()])
    own = _OWN.sub(lambda m: f"url(#{prefix}{m[1]})", value)
    if "url(" in _OWN.sub("", value):
        raise ValueError(f"a picture in a page refers to something outside: {value}")
    return own
