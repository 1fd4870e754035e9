"""Highlighted source with an anchor for every line, `L-12`."""

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound

from repopages.reading.model import Facts

_MOST = 400_000  # characters that are coloured: 1 MB of Python takes Pygments 3 s, and the browser as long
_FORMATTER = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)


def listing(facts: Facts) -> str:
    """Return the source of a file as HTML, or an empty text if it is not shown."""
    if not facts.text:
        return ""
    try:
        # Leading blank lines count, or all anchors would be off by them.
        lexer = get_lexer_by_name(facts.lexer if len(facts.text) <= _MOST else "text", stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return f'<div class="listing">{highlight(facts.text, lexer, _FORMATTER)}</div>'
