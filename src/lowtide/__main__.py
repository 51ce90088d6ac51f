"""``lowtide``, and ``python -m lowtide``."""

from lowtide.base import interrupts

interrupts.hold()  # importing the command line takes half a second

from lowtide.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
