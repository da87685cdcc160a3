"""Story families of the arithmetic scenario, English and Chinese.

A family is ``key | ranges | conditions | story | question | step ; step ...``. A step is ``lead text = expression``; ``r1`` is the
result of step one and so on; expressions use one operator. Slots: {n} {n2} names, {i} {i2} items, ranges are ``name:low..high``.
"""

EN_STORIES = """
buy_more | a:12..999 b:12..999 | | {n} has {a} {i} and buys {b} more. | How many {i} does {n} have now? | {n} now has = a + b
give_away | a:40..999 b:5..900 | a > b | {n} has {a} {i} and gives {b} to {n2}. | How many {i} does {n} have left? | {n} has left = a - b
two_days | a:20..900 b:20..900 | | {n} sold {a} {i} on Monday and {b} {i} on Tuesday. | How many {i} were sold in total? | In total = a + b
boxes | a:2..9 b:3..99 | | There are {a} boxes with {b} {i} each. | How many {i} are there? | Together = b * a
boxes_extra | a:2..9 b:3..99 c:2..90 | | {n} has {a} boxes with {b} {i} each and {c} loose {i}. | How many {i} does {n} have? | In the boxes = b * a ; With the loose ones = r1 + c
boxes_minus | a:2..9 b:6..99 c:2..60 | a * b > c | {n} fills {a} boxes with {b} {i} each. Then {c} {i} are taken out. | How many {i} remain? | In the boxes = b * a ; Remaining = r1 - c
share | q:3..60 b:2..9 | | {n} shares {q*b} {i} equally among {b} friends. | How many {i} does each friend get? | Each friend gets = q*b / b
share_then | q:6..60 b:2..9 c:1..5 | q > c | {n} shares {q*b} {i} equally among {b} children. Each child gives back {c}. | How many {i} does each child keep? | Each child gets = q*b / b ; Each child keeps = r1 - c
price | a:2..9 b:2..99 | | One of the {i} costs {b} dollars. | How much do {a} {i} cost? | The cost is = b * a
price_change | a:2..9 b:2..20 c:180..300 | c > a * b | {n} buys {a} {i} for {b} dollars each and pays with {c} dollars. | How much change does {n} get? | The cost is = b * a ; The change is = c - r1
two_prices | a:2..9 b:2..40 c:2..9 d:2..40 | | {n} buys {a} {i} for {b} dollars each and {c} {i2} for {d} dollars each. | How much does {n} pay? | The {i} cost = b * a ; The {i2} cost = d * c ; Together = r1 + r2
save_weekly | a:5..99 b:2..9 c:10..400 | | {n} has {c} dollars and saves {a} dollars every week for {b} weeks. | How much money does {n} have then? | The savings are = a * b ; In total = r1 + c
earn_hours | a:8..40 b:2..9 | | {n} earns {a} dollars an hour and works {b} hours. | How much does {n} earn? | {n} earns = a * b
earn_spend | a:8..40 b:4..9 c:5..30 | | {n} earns {a} dollars an hour, works {b} hours and spends {c} dollars on lunch. | How much is left? | {n} earns = a * b ; Left = r1 - c
speed | a:20..90 b:2..9 | | A train travels {a} kilometers an hour for {b} hours. | How far does it travel? | The distance is = a * b
time_for | q:2..60 b:2..9 | | {n} walks {q*b} kilometers in total, {b} kilometers every day. | How many days does it take? | The number of days is = q*b / b
pages | a:5..60 b:2..9 c:300..700 | c > a * b | A book has {c} pages. {n} reads {a} pages a day for {b} days. | How many pages are left? | Pages read = a * b ; Pages left = c - r1
older | a:4..40 b:2..30 | | {n} is {a} years old. {n2} is {b} years older. | How old is {n2}? | {n2} is = a + b
twice | a:6..400 | | {n} has {a} {i}. {n2} has twice as many. | How many {i} do they have together? | {n2} has = a * 2 ; Together = a + r1
times_as_many | a:6..90 b:3..9 | | {n} has {a} {i}. {n2} has {b} times as many. | How many {i} does {n2} have? | {n2} has = a * b
half | q:5..400 | | {n} has {q*2} {i} and sells half of them. | How many {i} are left? | Half is = q*2 / 2
more_than | a:20..500 b:5..300 | | {n} has {a} {i}. {n2} has {b} more than {n}. | How many {i} do they have together? | {n2} has = a + b ; Together = a + r1
fewer_than | a:60..500 b:5..50 | | {n} has {a} {i}. {n2} has {b} fewer than {n}. | How many {i} do they have together? | {n2} has = a - b ; Together = a + r1
rows | a:2..9 b:4..60 | | A garden has {a} rows with {b} trees each. | How many trees are there? | The number of trees is = b * a
seats | a:4..9 b:20..60 c:5..70 | | A hall has {a} rows with {b} seats. {c} seats are taken. | How many seats are free? | Seats = b * a ; Free seats = r1 - c
bus | a:20..60 b:2..15 c:2..20 | a > b | A bus has {a} passengers. {b} get off and {c} get on. | How many passengers are on the bus now? | After the stop = a - b ; Now = r1 + c
three_days | a:20..300 b:20..300 c:20..300 | | {n} collects {a} {i} on Monday, {b} on Tuesday and {c} on Wednesday. | How many {i} does {n} collect? | First two days = a + b ; In total = r1 + c
goal | a:20..400 b:450..900 | | {n} wants {b} {i} and already has {a}. | How many {i} are missing? | Missing = b - a
recipe | a:2..9 b:2..40 | | One cake needs {b} eggs. | How many eggs do {a} cakes need? | Eggs needed = b * a
water | a:3..30 b:2..9 c:300..600 | | A tank holds {c} liters. Every hour {a} liters flow out. | How many liters are left after {b} hours? | Flowed out = a * b ; Left = c - r1
fill | a:3..30 b:2..9 c:10..90 | | A tank holds {c} liters. Every minute {a} liters flow in. | How many liters are in it after {b} minutes? | Flowed in = a * b ; In the tank = c + r1
groups | q:3..40 b:2..9 | | {q*b} students form groups of {b}. | How many groups are there? | The number of groups is = q*b / b
bags_sold | a:2..9 b:4..30 c:2..9 | | {n} packs {a} bags with {b} {i} each and sells each bag for {c} dollars. | How many dollars does {n} get? | The money is = c * a
percent_ten | q:2..90 | | {n} has {q*10} {i} and gives away 10 percent. | How many {i} does {n} give away? | Ten percent is = q*10 / 10
half_price | q:5..200 | | A coat costs {q*2} dollars and is sold for half the price. | What is the new price? | The new price is = q*2 / 2
discount | a:60..400 b:5..50 | | A lamp costs {a} dollars. The shop takes {b} dollars off. | What does the lamp cost now? | The new price is = a - b
birthday | a:1990..2015 b:5..60 | | {n} was born in {a}. | In which year does {n} turn {b}? | The year is = a + b
temperature | a:10..30 b:2..9 | a > b | In the morning it is {a} degrees. By noon it is {b} degrees warmer. | How warm is it at noon? | At noon = a + b
legs | a:3..90 | | A farm has {a} horses with 4 legs each. | How many legs do the horses have? | The number of legs is = a * 4
weeks | a:2..80 | | A trip takes {a} weeks. | How many days is that? | The number of days is = a * 7
dozen | a:4..60 b:2..9 | | {n} bakes {b} trays with {a} cookies each and eats 2 cookies. | How many cookies are left? | Baked = a * b ; Left = r1 - 2
team_points | a:5..60 b:5..60 c:5..60 | | A team scores {a}, {b} and {c} points in three games. | How many points is that? | First two games = a + b ; In total = r1 + c
split_bill | q:5..60 b:2..9 c:3..30 | | {b} friends pay a bill of {q*b} dollars in equal parts. {n} adds {c} dollars as a tip. | How much does {n} pay? | Each part is = q*b / b ; {n} pays = r1 + c
rope | a:100..900 b:20..90 | | A rope is {a} centimeters long. {n} cuts off {b} centimeters. | How long is the rest? | The rest is = a - b
lost_found | a:60..500 b:10..50 c:5..40 | | {n} had {a} {i}, lost {b} and found {c}. | How many {i} does {n} have now? | After the loss = a - b ; Now = r1 + c
"""

ZH_STORIES = """
zh_buy | a:12..999 b:12..999 | | {zn}有{a}{zm}{zi}，又买了{b}{zm}。 | 现在一共有多少{zm}{zi}？ | 现在有 = a + b
zh_give | a:40..999 b:5..900 | a > b | {zn}有{a}{zm}{zi}，送给{zn2}{b}{zm}。 | 还剩多少{zm}{zi}？ | 还剩 = a - b
zh_boxes | a:2..9 b:3..99 | | 有{a}个箱子，每个箱子装{b}{zm}{zi}。 | 一共有多少{zm}{zi}？ | 一共有 = b * a
zh_boxes_extra | a:2..9 b:3..99 c:2..90 | | {zn}有{a}箱{zi}，每箱{b}{zm}，另外还有{c}{zm}。 | 一共有多少{zm}{zi}？ | 箱子里有 = b * a ; 一共有 = r1 + c
zh_share | q:3..60 b:2..9 | | 把{q*b}{zm}{zi}平均分给{b}个小朋友。 | 每人分到多少{zm}？ | 每人分到 = q*b / b
zh_price | a:2..9 b:2..99 | | 一{zm}{zi}{b}元。 | 买{a}{zm}要多少元？ | 一共要 = b * a
zh_change | a:2..9 b:2..20 c:180..300 | | {zn}买了{a}{zm}{zi}，每{zm}{b}元，付了{c}元。 | 应找回多少元？ | 花了 = b * a ; 找回 = c - r1
zh_save | a:5..99 b:2..9 c:10..400 | | {zn}有{c}元，每周存{a}元，存了{b}周。 | 现在有多少元？ | 存了 = a * b ; 现在有 = r1 + c
zh_speed | a:20..90 b:2..9 | | 一辆汽车每小时行{a}千米，行了{b}小时。 | 一共行了多少千米？ | 一共行了 = a * b
zh_pages | a:5..60 b:2..9 c:300..700 | c > a * b | 一本书有{c}页，{zn}每天看{a}页，看了{b}天。 | 还剩多少页？ | 看了 = a * b ; 还剩 = c - r1
zh_older | a:4..40 b:2..30 | | {zn}今年{a}岁，{zn2}比{zn}大{b}岁。 | {zn2}今年多少岁？ | {zn2}今年 = a + b
zh_times | a:6..90 b:3..9 | | {zn}有{a}{zm}{zi}，{zn2}的数量是{zn}的{b}倍。 | {zn2}有多少{zm}{zi}？ | {zn2}有 = a * b
zh_half | q:5..400 | | {zn}有{q*2}{zm}{zi}，卖掉了一半。 | 还剩多少{zm}？ | 还剩 = q*2 / 2
zh_more | a:20..500 b:5..300 | | {zn}有{a}{zm}{zi}，{zn2}比{zn}多{b}{zm}。 | 两人一共有多少{zm}？ | {zn2}有 = a + b ; 一共有 = a + r1
zh_trees | a:2..9 b:4..60 | | 果园里有{a}行果树，每行{b}棵。 | 一共有多少棵？ | 一共有 = b * a
zh_bus | a:20..60 b:2..15 c:2..20 | a > b | 车上有{a}人，下去{b}人，又上来{c}人。 | 现在车上有多少人？ | 下车后有 = a - b ; 现在有 = r1 + c
zh_days | a:20..300 b:20..300 c:20..300 | | {zn}第一天做了{a}{zm}{zi}，第二天做了{b}{zm}，第三天做了{c}{zm}。 | 一共做了多少{zm}？ | 前两天做了 = a + b ; 一共做了 = r1 + c
zh_goal | a:20..400 b:450..900 | | {zn}想要{b}{zm}{zi}，已经有{a}{zm}。 | 还差多少{zm}？ | 还差 = b - a
zh_groups | q:3..40 b:2..9 | | {q*b}名同学，每{b}人一组。 | 可以分成多少组？ | 可以分成 = q*b / b
zh_water | a:3..30 b:2..9 c:300..600 | | 水箱里有{c}升水，每小时流出{a}升。 | {b}小时后还剩多少升？ | 流出 = a * b ; 还剩 = c - r1
zh_two_prices | a:2..9 b:2..40 c:2..9 d:2..40 | | {zn}买了{a}{zm}{zi}，每{zm}{b}元；又买了{c}本书，每本{d}元。 | 一共花了多少元？ | {zi}花了 = b * a ; 书花了 = d * c ; 一共花了 = r1 + r2
zh_lost | a:60..500 b:10..50 c:5..40 | | {zn}有{a}{zm}{zi}，丢了{b}{zm}，又找到{c}{zm}。 | 现在有多少{zm}？ | 丢了以后有 = a - b ; 现在有 = r1 + c
zh_week | a:2..80 | | 一次旅行要{a}周。 | 一共是多少天？ | 一共是 = a * 7
"""
