"""Entry point of the agent: ``python -m lowtide.runtime.agent.start``. During its imports, Ctrl-C prints no traceback."""

from lowtide.base import interrupts

interrupts.hold()

from lowtide.runtime.agent.main import main  # noqa: E402 - importing it takes most of a second

if __name__ == "__main__":
    main()  # the script becomes __main__
