"""`bundle` and `verify`: one result in one file, from which anybody can repeat it.

A bundle is a ZIP archive of five entries, stored without compression:

    README.txt      what it is, and the commands that check it
    result.json     the problem's rows and the machine, in the project's result format (results.py)
    bundle.json     how they came about: problem, seed, kernel, library, raw times, digests of tensors
    unit.cu         the generated unit that the kernel was compiled from; empty where it was not at hand
    manifest.json   the SHA-256 of each entry above

archive.py   files ↔ archive; the same files give the same bytes, and nothing else is read back
record.py    bundle.json, as values
make.py      the command `bundle`: from a result file, or by measuring here
check.py     the command `verify`: what agrees, what differs, by how much

A bundle is not signed. Its digests find damage and careless edits; whoever writes new digests has to be
found by running it again.
"""
