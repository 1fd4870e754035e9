"""ZeRO. Every parameter has one owner, the rank that keeps its optimizer state and steps it for all."""
