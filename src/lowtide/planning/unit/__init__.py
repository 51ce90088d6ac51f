"""The game as eager plays it: order fixed, decisions by value and gap, values remade where backward asks for them."""
