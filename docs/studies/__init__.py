"""The studies behind the figures of docs/results. Their authors run them in a checkout; the wheel does not contain them."""
