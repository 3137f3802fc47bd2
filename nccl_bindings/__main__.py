"""`python -m nccl_bindings [PATH]`: what the loaded NCCL can do. Needs no GPU."""
from __future__ import annotations

import sys

from nccl_bindings.errors import LibraryProblem
from nccl_bindings.library import FEATURES, Library, load, version_text


def feature_table(library: Library) -> list[str]:
    """One line a feature: name, whether it is there, its first version, what it means."""
    lines = [f"NCCL {version_text(library.version)}  {library.path}",
             f"{'feature':<20}{'here':<6}{'since':<9}what it is"]
    lines += [f"{f.name:<20}{'yes' if library.has(f.name) else 'no':<6}{version_text(f.first_version):<9}{f.meaning}"
              for f in FEATURES]
    return lines


def main(arguments: list[str]) -> int:
    try:
        library = load(arguments[0] if arguments else None)
    except (LibraryProblem, OSError) as error:
        print(f"nccl_bindings: {error}", file=sys.stderr)
        return 2
    print("\n".join(feature_table(library)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
