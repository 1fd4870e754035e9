"""Every parameter has one owner, who keeps its optimizer state and steps it for all."""
