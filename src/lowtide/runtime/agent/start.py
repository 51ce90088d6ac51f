"""``python -m lowtide.runtime.agent.start``: a verb's process begins. Ctrl-C is silent while the agent is imported."""

from lowtide.base import interrupts

interrupts.hold()

from lowtide.runtime.agent.main import main  # noqa: E402 - that takes most of a second

if __name__ == "__main__":
    main()  # the script becomes __main__
