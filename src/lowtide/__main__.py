"""``python -m lowtide``."""

from lowtide.cli.main import main

if __name__ == "__main__":
    main()
