"""How the process of a verb begins (``python -m lowtide.start``): Ctrl-C is silent while the agent is imported."""

from lowtide import interrupts

interrupts.hold()

from lowtide.live.agent import main  # noqa: E402 - that takes most of a second

if __name__ == "__main__":
    main()  # the script becomes __main__
