"""Write digits.csv, the copy of the UCI handwritten digits that scikit-learn carries, in scikit-learn's order.

Only for whoever wants to see where the file comes from; nothing in the project runs this or needs scikit-learn:

    python3 -m venv /tmp/digits && /tmp/digits/bin/pip install scikit-learn
    /tmp/digits/bin/python examples/data/make_digits.py
"""

from pathlib import Path

from sklearn.datasets import load_digits

digits = load_digits()
rows = [[*(int(p) for p in pixels), int(label)] for pixels, label in zip(digits.data, digits.target, strict=True)]
assert len(rows) == 1797 and all(len(row) == 65 and min(row) >= 0 and max(row) <= 16 for row in rows)
path = Path(__file__).with_name("digits.csv")
path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="ascii")
