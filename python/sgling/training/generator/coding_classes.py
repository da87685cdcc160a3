"""Small classes for the coding scenario: request texts, class body, an executed usage example, one why-sentence."""

# ruff: noqa: E501

CLASS_FAMILIES = {
    "stack": (
        "a class `$C` for a stack with push, pop and size",
        "一个栈类`$C`，支持push、pop和size",
        "class $C:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n        return self.items.pop()\n\n    def size(self):\n        return len(self.items)",
        "$v = $C()\n$v.push($x)\n$v.push($y)\nprint($v.pop())\nprint($v.size())",
        "The last item that was pushed is the first one to leave.",
        "最后放入的元素最先取出。",
    ),
    "queue": (
        "a class `$C` for a queue with add, take and is_empty",
        "一个队列类`$C`，支持add、take和is_empty",
        "class $C:\n    def __init__(self):\n        self.items = []\n\n    def add(self, item):\n        self.items.append(item)\n\n"
        "    def take(self):\n        return self.items.pop(0)\n\n    def is_empty(self):\n        return not self.items",
        "$v = $C()\n$v.add($x)\n$v.add($y)\nprint($v.take())\nprint($v.is_empty())",
        "The first item that was added is the first one to leave.",
        "最先加入的元素最先取出。",
    ),
    "counter": (
        "a class `$C` that counts up from a start value",
        "一个从初始值开始计数的类`$C`",
        "class $C:\n    def __init__(self, start):\n        self.value = start\n\n    def increase(self):\n        self.value += 1\n"
        "        return self.value",
        "$v = $C($x)\nprint($v.increase())\nprint($v.increase())",
        "Every call of increase adds one and returns the new value.",
        "每次调用increase都加一并返回新值。",
    ),
    "account": (
        "a class `$C` for an account with deposit, withdraw and balance",
        "一个账户类`$C`，支持存入deposit、取出withdraw和余额balance",
        "class $C:\n    def __init__(self):\n        self.balance = 0\n\n    def deposit(self, amount):\n        self.balance += amount\n\n"
        '    def withdraw(self, amount):\n        if amount > self.balance:\n            raise ValueError("not enough money")\n'
        "        self.balance -= amount",
        "$v = $C()\n$v.deposit($x + $y)\n$v.withdraw($y)\nprint($v.balance)",
        "withdraw raises an error if the balance is too small.",
        "余额不足时withdraw会报错。",
    ),
    "rectangle": (
        "a class `$C` for a rectangle with area and perimeter",
        "一个长方形类`$C`，可以计算面积area和周长perimeter",
        "class $C:\n    def __init__(self, width, height):\n        self.width = width\n        self.height = height\n\n"
        "    def area(self):\n        return self.width * self.height\n\n    def perimeter(self):\n        return 2 * (self.width + self.height)",
        "$v = $C($x, $y)\nprint($v.area())\nprint($v.perimeter())",
        "Both methods use the stored width and height.",
        "两个方法都使用保存的宽和高。",
    ),
}
