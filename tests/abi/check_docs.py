"""Every exported function's doc block is complete: a sentence, each parameter, return, threadsafety, collective,
blocking, since. Usage: check_docs.py"""

import re
import sys

from headers import read


def complaints(function):
    doc = function.doc
    if not doc.strip():
        yield "has no doc block"
        return
    if doc.lstrip().startswith("@"):
        yield "does not begin with a sentence"
    documented = re.findall(r"@param\s+(\w+)\s+(\S)", doc)
    names = [name for name, _ in documented]
    params = [param.name for param in function.params]
    for name in params:
        if name not in names:
            yield f"does not tell @param {name}"
    for name in names:
        if name not in params:
            yield f"tells @param {name}, which it does not have"
    if names != [name for name in params if name in names]:
        yield "tells its parameters in another order than it takes them"
    if (function.returns != "void") != ("@return" in doc):
        yield "must tell @return if, and only if, it returns something"
    for tag, pattern in {
        "@threadsafety": r"@threadsafety\s+(any thread|exclusive)",
        "@collective": r"@collective\s+(yes|no|with options->comm)\b",
        "@blocking": r"@blocking\s+(yes|no|only (without work|with share_params|over a tsr_fsdp|a unit on its way|"
        r"if collective))\b",
        "@since": r"@since\s+\d+\.\d+\s+(experimental|stable|deprecated)\b",
    }.items():
        if not re.search(pattern, doc):
            yield f"lacks {tag}, or says none of the words it knows"


def main():
    all_functions = read().functions
    bad = [f"{f.header}: {f.name} {why}" for f in all_functions for why in complaints(f)]
    print("\n".join(bad) if bad else f"{len(all_functions)} functions are documented")
    return 1 if bad or not all_functions else 0


if __name__ == "__main__":
    sys.exit(main())
