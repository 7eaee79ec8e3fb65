"""Write the solved numbers into the shipped profiles."""

from pptune.profiles import save_profile
from tests.published import calibrated_profiles
from tests.published.solving import PROFILES

for name, profile in calibrated_profiles().items():
    save_profile(profile, PROFILES / f"{name}.json")
