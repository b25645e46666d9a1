"""Training of a DFlash drafter for a user's own target; needs the extra `train`."""
