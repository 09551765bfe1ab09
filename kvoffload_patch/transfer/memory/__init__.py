"""CPU memory for slots: mapped, placed, touched, registered, grown."""
