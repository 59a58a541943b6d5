"""Tasks on the embedded phone, with validators that read its state and experts that solve them."""
