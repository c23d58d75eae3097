"""The loop that joins the parts. (Not called `fit`: the room would hide the function of that name.)"""
