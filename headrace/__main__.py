"""``python -m headrace`` is the same as ``headrace``.

Kept light and guarded: an engine that runs in a spawned process imports this module again.
"""

if __name__ == "__main__":
    from headrace.cli import main

    main(prog_name="headrace")
