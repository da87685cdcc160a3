"""Slot values shared by the scenarios: names, things, places. Plain lists, ours, English and Chinese."""

from __future__ import annotations

from .base import OpenPool

_EN_NAMES = """Ada Adam Aisha Alan Alex Alice Amara Amir Amy Ana Andre Anna Anya Ari Arjun Ava Bea Ben Bella Bilal
Bruno Caleb Carla Carlos Cara Chen Chloe Clara Cleo Colin Cora Dana Daniel Daria David Dev Diego Dina Dora Eddie
Elena Eli Elsa Emil Emma Eric Erin Esme Ethan Eva Ezra Faith Farah Felix Finn Fiona Flora Frank Freya Gina Grace
Greg Gus Hana Hank Hassan Hazel Heidi Henry Hugo Ida Ian Igor Ines Ira Iris Isaac Isla Ivan Ivy Jack Jade Jamal
James Jana Jane Jason Jean Jenna Joel John Jonas Julia June Kai Karen Karim Kate Keira Ken Kofi Kurt Laila Lara Lars
Laura Layla Leah Lena Leo Liam Lily Lina Lisa Louis Lucas Lucy Luis Luna Maja Malik Marco Maria Mark Marta Mason
Matt Maya Mei Mia Milan Milo Mina Mira Mona Nadia Nate Neil Nia Nico Nina Noah Nora Olga Oliver Omar Oscar Otto Owen
Pablo Paul Penny Peter Petra Pia Quinn Rafi Raj Rana Ravi Rex Rhea Rita Rob Rosa Rosie Ruby Rui Ruth Ryan Sage Sam
Samir Sana Sara Sean Selma Seth Shay Sofia Sonia Stan Stella Sven Tara Tariq Ted Tess Theo Tina Toby Tom Uma Vera
Vic Victor Viola Wade Wendy Will Xena Yara Yasmin Yuki Yusuf Zane Zara Zoe Zuri"""
EN_NAMES = OpenPool(_EN_NAMES.split())

_ZH_SURNAMES = "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕"
_ZH_FORMS = "老师 阿姨 叔叔 先生 女士 师傅 同学 医生".split() * 6
ZH_NAMES = OpenPool(
    ["小" + char for char in "明红华丽刚军芳敏静强磊洋艳勇杰娟涛超霞平辉鹏雪梅兰林云峰雨晨"]
    + [a + b for a, b in zip(_ZH_SURNAMES, _ZH_FORMS, strict=False)]
)

_EN_ITEMS = """apples pears oranges lemons plums cherries peaches melons grapes mangoes carrots potatoes onions
tomatoes beans eggs cookies muffins cakes pies candies sandwiches pizzas bottles cups plates bowls spoons forks
towels blankets pillows candles lamps books notebooks pencils pens crayons markers stickers stamps postcards posters
maps magazines envelopes folders marbles balls kites puzzles dolls robots blocks cards coins shells stones buttons
beads ribbons balloons flowers roses tulips seeds trees bricks boards nails screws bolts tiles bags boxes hats
shirts socks scarves gloves shoes belts badges medals tickets keys bells"""
EN_ITEMS = OpenPool(_EN_ITEMS.split())

_ZH_ITEMS = """个:苹果 个:橙子 个:梨 个:桃子 个:西瓜 个:鸡蛋 个:面包 个:包子 个:气球 个:杯子 个:盘子 个:篮球 个:足球
颗:糖 颗:珠子 颗:草莓 块:饼干 块:巧克力 块:积木 块:橡皮 支:铅笔 支:钢笔 支:蜡笔 本:书 本:练习本 本:杂志 张:邮票
张:卡片 张:贴纸 张:门票 朵:花 朵:玫瑰 棵:树 棵:白菜 瓶:水 瓶:牛奶 盒:牛奶 盒:彩笔 条:毛巾 条:围巾 条:鱼 件:衬衫
件:玩具 把:尺子 把:椅子 袋:大米 袋:土豆 只:风筝"""
ZH_ITEMS = OpenPool(tuple(pair.split(":")) for pair in _ZH_ITEMS.split())

_CITIES = """Paris:巴黎 London:伦敦 Berlin:柏林 Madrid:马德里 Rome:罗马 Vienna:维也纳 Oslo:奥斯陆 Dublin:都柏林
Lisbon:里斯本 Athens:雅典 Prague:布拉格 Warsaw:华沙 Zurich:苏黎世 Milan:米兰 Munich:慕尼黑 Geneva:日内瓦 Tokyo:东京
Osaka:大阪 Seoul:首尔 Beijing:北京 Shanghai:上海 Shenzhen:深圳 Hangzhou:杭州 Guangzhou:广州 Chengdu:成都
Nanjing:南京 Wuhan:武汉 Xian:西安 Suzhou:苏州 Chongqing:重庆 Tianjin:天津 Qingdao:青岛 Dalian:大连 Xiamen:厦门
Kunming:昆明 Singapore:新加坡 Bangkok:曼谷 Hanoi:河内 Jakarta:雅加达 Delhi:德里 Mumbai:孟买 Dubai:迪拜 Cairo:开罗
Nairobi:内罗毕 Lagos:拉各斯 Sydney:悉尼 Melbourne:墨尔本 Auckland:奥克兰 Toronto:多伦多 Vancouver:温哥华
Montreal:蒙特利尔 Boston:波士顿 Chicago:芝加哥 Seattle:西雅图 Denver:丹佛 Austin:奥斯汀 Dallas:达拉斯 Houston:休斯敦
Miami:迈阿密 Atlanta:亚特兰大 Phoenix:凤凰城 Lima:利马 Bogota:波哥大 Santiago:圣地亚哥 Helsinki:赫尔辛基
Stockholm:斯德哥尔摩 Copenhagen:哥本哈根 Brussels:布鲁塞尔 Budapest:布达佩斯 Istanbul:伊斯坦布尔 Porto:波尔图
Lyon:里昂 Hamburg:汉堡"""
CITIES = OpenPool(tuple(pair.split(":")) for pair in _CITIES.split())

_NOUNS = """value item number total score price count name word text line row cell node path file key list data
record entry user order task event point step level index size width height depth weight length age date time day
month year color shape group team player game book page note letter token symbol digit sum mean rate ratio limit
offset range unit part piece block table column field message signal sensor reading sample batch queue stack graph
edge tree leaf branch city street house room product cart basket stock invoice account balance payment budget salary
ticket seat train route stop track song album film recipe menu meal drink fruit animal plant flower stone river
island mountain planet star moon cloud storm season"""
NOUNS = OpenPool(_NOUNS.split())

_VERBS = """get find compute make build check collect select count sum filter sort merge split join read parse
format convert update process handle calc take pick show list map scan search clean load"""
VERBS = OpenPool(_VERBS.split())

_WORDS = """amber anchor apple arrow autumn bamboo basket beacon berry bird blue boat bread breeze bridge bright
brook butter candle canyon cedar chalk cherry circle clay clever cloud coast copper coral corner cotton creek crisp
crystal daisy dawn desert dove dream dust eagle early earth echo ember evening falcon feather fern field flame
forest fox frost garden gentle glass gold grain grass green hammer harbor hazel hill honey horse ice iron island
ivory jade jelly juice kite ladder lake lantern lark leaf lemon light lily lion maple marble meadow melon mint
mirror mist moon moss nest north oak ocean olive opal orange orchid otter owl paper pearl pebble pepper pine plain
plum pond poppy quartz quiet rabbit rain raven red reed ribbon ridge river robin rose ruby sail salt sand shadow
shell silver sky slate snow spark spice spring star stone storm sugar summer sun swan thistle thunder tiger timber
topaz tower trail tulip valley velvet violet walnut water wave wheat willow wind winter wolf yellow zebra"""
WORDS = OpenPool(_WORDS.split())
