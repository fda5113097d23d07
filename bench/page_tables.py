"""Tables of the documentation that are written from benchmark results, and checked against them."""
import json
import sys


def load(folder, name):
    """The JSON of one benchmark."""
    with open(folder / f"{name}.json", encoding="utf-8") as file:
        return json.load(file)


def load_rows(folder, name):
    """Its rows, by their names."""
    return {row["name"]: row for row in load(folder, name)["rows"]}


def join(values, form):
    return " / ".join(format(value, form) for value in values)


def replace(text, name, lines):
    """`text` with the lines between `<!-- name -->` and the next `<!-- end -->`."""
    begin, end = f"<!-- {name} -->\n", "<!-- end -->\n"
    before, rest = text.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]


def write(path, text, check):
    """Writes a page or picture; with `check` only fails when it is another."""
    if not check:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        sys.exit(f"{path} is not what the results say; run {sys.argv[0]}")
