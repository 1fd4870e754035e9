"""The site: Sphinx runs on the pages, sources are highlighted, links are checked."""
