"""A small checkout to document."""

import textwrap
from pathlib import Path

FILES = {
    "pyproject.toml": "",
    "README.md": """
        # The shop

        See the [glossary](docs/glossary.md), the [till](src/shop/_till.py) and [notes](notes/README.md).
        """,
    "notes/README.md": "# Not part of the site",
    "docs/glossary.md": """
        # Glossary

        | word | meaning |
        |---|---|
        | **infusion** | tea in water |
        """,
    "src/shop/__init__.py": '''
        """Sell things.

        Example::

            shop.sell("tea")
        """
        from shop._till import sell
        from shop.goods import Tea as Drink

        raise SystemExit("imported")
        __all__ = ["Drink", "sell"]
        ''',
    "src/shop/_till.py": '''
        """The till."""
        import subprocess

        def sell(what: str, *, price: float = 1.0) -> bool:
            """Sell one thing.

            Args:
                what: The thing, such as `Drink`.
                price: In euros.
                    At least 0.

            Returns:
                Whether it was sold.

            Raises:
                ValueError: If the price is negative.
            """
            if price < 0:
                raise ValueError(f"price={price} is negative: give {what} away instead")
            subprocess.run(["true"])
            return True
        ''',
    "src/shop/goods.py": '''
        """Goods."""
        class Tea:
            """A drink, which becomes an infusion.

            Parameters
            ----------
            grams : int
                How much of *it*.
            """
            leaves = 3
            """Number of leaves."""

            def brew(self, minutes):
                """Brew it."""
        ''',
    "tests/__init__.py": "",
    "tests/test_shop.py": "import shop\n\ndef test_sell():\n    shop.sell('tea')\n",
}
"""A package with a private module, a re-export under another name, and code that must not run."""


def write_checkout(folder: Path) -> Path:
    """Write the shop's checkout, and return the folder of its package."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder / "src" / "shop"
