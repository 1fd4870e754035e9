"""Pages as Markdown, and the keywords that lead to them."""
