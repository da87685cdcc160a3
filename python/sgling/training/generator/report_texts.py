"""Sentences of the long-report scenario, English and Chinese; {m} is a metric, {o} the organisation, {u} a unit."""

from __future__ import annotations

EN_DOMAINS = {
    "shop": (
        "Sales report",
        (
            ("revenue", "dollars"),
            ("orders", "orders"),
            ("visitors", "people"),
            ("returns", "parcels"),
            ("new customers", "people"),
            ("stock", "items"),
        ),
    ),
    "website": (
        "Website report",
        (
            ("page views", "views"),
            ("sign-ups", "users"),
            ("comments", "comments"),
            ("load time", "milliseconds"),
            ("downloads", "files"),
            ("errors", "errors"),
        ),
    ),
    "support": (
        "Support report",
        (
            ("tickets", "tickets"),
            ("solved cases", "cases"),
            ("waiting time", "minutes"),
            ("calls", "calls"),
            ("complaints", "complaints"),
            ("emails", "emails"),
        ),
    ),
    "factory": (
        "Production report",
        (
            ("output", "units"),
            ("defects", "units"),
            ("energy use", "kilowatt hours"),
            ("downtime", "minutes"),
            ("deliveries", "trucks"),
            ("staff hours", "hours"),
        ),
    ),
    "library": (
        "Library report",
        (
            ("loans", "books"),
            ("visitors", "people"),
            ("new members", "people"),
            ("events", "events"),
            ("late returns", "books"),
            ("purchases", "books"),
        ),
    ),
    "school": (
        "School report",
        (
            ("students", "students"),
            ("absences", "days"),
            ("club members", "students"),
            ("library loans", "books"),
            ("lunches", "meals"),
            ("bus riders", "students"),
        ),
    ),
    "farm": (
        "Harvest report",
        (
            ("wheat", "tons"),
            ("apples", "crates"),
            ("water use", "liters"),
            ("milk", "liters"),
            ("eggs", "eggs"),
            ("working days", "days"),
        ),
    ),
    "gym": (
        "Gym report",
        (
            ("members", "people"),
            ("visits", "visits"),
            ("courses", "courses"),
            ("income", "dollars"),
            ("cancellations", "people"),
            ("trial days", "days"),
        ),
    ),
    "cafe": (
        "Cafe report",
        (
            ("guests", "people"),
            ("coffees", "cups"),
            ("cakes", "pieces"),
            ("income", "dollars"),
            ("waste", "kilograms"),
            ("reservations", "tables"),
        ),
    ),
    "bikes": (
        "Bike share report",
        (
            ("rides", "rides"),
            ("bikes", "bikes"),
            ("repairs", "repairs"),
            ("distance", "kilometers"),
            ("new users", "people"),
            ("stations", "stations"),
        ),
    ),
}
EN_PERIODS = (
    ("January", "February"),
    ("February", "March"),
    ("March", "April"),
    ("April", "May"),
    ("May", "June"),
    ("June", "July"),
    ("July", "August"),
    ("August", "September"),
    ("September", "October"),
    ("October", "November"),
    ("the first quarter", "the second quarter"),
    ("last week", "this week"),
)
EN_UP = (
    "This is a clear step forward.",
    "The rise began in the first week and continued to the end.",
    "Most of the growth came from regular users.",
    "The team had expected a smaller change.",
    "The trend has been positive for some time.",
    "It is the strongest result of the year so far.",
    "Good preparation made this possible.",
    "The increase was spread evenly over the period.",
    "Weekends contributed more than usual.",
    "We should check whether the growth is stable.",
)
EN_DOWN = (
    "This is a step back that needs attention.",
    "The fall was strongest in the second half.",
    "Part of the decline is seasonal.",
    "The team has already discussed the reasons.",
    "The trend should be watched closely.",
    "A few single days explain most of the drop.",
    "Lower activity on weekends played a role.",
    "The change is smaller than it looks at first.",
    "There is no sign of a lasting problem.",
    "We should compare the value with the same period of last year.",
)
EN_FLAT = (
    "The value did not change.",
    "The result is exactly the same as before.",
    "Nothing moved here, which is good for planning.",
)
EN_CAUSES = (
    "The main reason was the weather.",
    "A new schedule helped to use the time better.",
    "Several small improvements came together.",
    "Local events changed the usual pattern.",
    "Two people joined the team during this time.",
    "The holiday period had a visible effect.",
    "A technical update changed how the value is counted.",
    "Customers reacted to the new prices.",
    "Better communication between the groups played a part.",
    "The supplier delivered later than planned.",
    "Advertising reached more people than before.",
    "The repair of old equipment took some days.",
)
EN_OUTLOOK = (
    "For the next period we expect a similar level.",
    "A small increase is likely in the coming weeks.",
    "The next review will look at {m} again.",
    "We plan to keep the current approach.",
    "A careful forecast is a change of a few percent.",
    "The target for {m} stays the same.",
    "More data is needed before we change the plan.",
    "{o} will follow {m} every week.",
)
EN_RISKS = (
    "Costs may rise faster than planned.",
    "One supplier provides most of the material.",
    "Key people could be absent at the same time.",
    "The weather can change the demand quickly.",
    "Old equipment may fail without warning.",
    "Data is still collected by hand in some places.",
    "Competition in the area is growing.",
    "Prices for energy are hard to predict.",
    "New rules could require extra work.",
    "The budget leaves little room for surprises.",
    "Training for new staff takes time.",
    "Customers may wait for a better offer.",
)
EN_STEPS = (
    "Review {m} in the weekly meeting.",
    "Write down the causes and share them with everyone.",
    "Ask ten customers for their opinion.",
    "Check the equipment before the next period.",
    "Set a clear target for {m}.",
    "Prepare a second supplier.",
    "Train two more people.",
    "Compare the figures with last year.",
    "Update the plan and the budget.",
    "Collect the data automatically.",
    "Test one change at a time.",
    "Report the results at the end of the month.",
)
EN_CONCLUSIONS = (
    "{o} can look back on a solid period. The figures give a good basis for the next decisions.",
    "Overall the situation is under control. The next steps are small and clear.",
    "The period brought both progress and open questions. With steady work {o} can reach its targets.",
    "The report shows where attention is needed. The team knows what to do next.",
)
ZH_DOMAINS = {
    "商店": (
        "销售报告",
        (("销售额", "元"), ("订单", "单"), ("客流", "人"), ("退货", "件"), ("新客户", "人"), ("库存", "件")),
    ),
    "网站": ("网站报告", (("浏览量", "次"), ("注册人数", "人"), ("评论", "条"), ("下载量", "次"), ("错误", "次"))),
    "图书馆": ("图书馆报告", (("借书量", "本"), ("读者", "人"), ("新会员", "人"), ("活动", "场"), ("购书", "本"))),
    "工厂": ("生产报告", (("产量", "件"), ("次品", "件"), ("用电量", "度"), ("停机时间", "分钟"), ("发货", "车"))),
    "咖啡馆": ("经营报告", (("客人", "人"), ("咖啡", "杯"), ("蛋糕", "块"), ("收入", "元"), ("预订", "桌"))),
    "农场": ("收成报告", (("小麦", "吨"), ("苹果", "箱"), ("用水量", "升"), ("牛奶", "升"), ("鸡蛋", "个"))),
}
ZH_PERIODS = (
    ("一月", "二月"),
    ("二月", "三月"),
    ("三月", "四月"),
    ("四月", "五月"),
    ("五月", "六月"),
    ("六月", "七月"),
    ("七月", "八月"),
    ("八月", "九月"),
    ("上周", "本周"),
    ("第一季度", "第二季度"),
)
ZH_UP = (
    "这是明显的进步。",
    "增长从第一周开始，一直持续到最后。",
    "增长主要来自老用户。",
    "团队原来预计的变化更小。",
    "这是今年以来最好的结果。",
    "充分的准备带来了这个结果。",
    "周末的贡献比平时更大。",
)
ZH_DOWN = (
    "这个变化需要注意。",
    "后半段下降得更明显。",
    "一部分下降是季节原因。",
    "团队已经讨论过原因。",
    "少数几天造成了大部分下降。",
    "目前没有长期问题的迹象。",
    "应该和去年同期再比较一次。",
)
ZH_FLAT = ("数值没有变化。", "结果和之前完全一样。")
ZH_CAUSES = (
    "主要原因是天气。",
    "新的安排提高了效率。",
    "几项小的改进一起发挥了作用。",
    "当地的活动改变了平时的规律。",
    "这段时间有两位新同事加入。",
    "假期的影响比较明显。",
    "供应商的发货比计划晚。",
    "宣传覆盖了更多的人。",
)
ZH_OUTLOOK = (
    "下一阶段预计保持相近的水平。",
    "接下来几周可能会小幅增长。",
    "下次会议会再次检查{m}。",
    "我们计划保持现在的做法。",
    "{m}的目标保持不变。",
    "调整计划之前还需要更多数据。",
)
ZH_RISKS = (
    "成本的增长可能比计划快。",
    "大部分材料来自一个供应商。",
    "旧设备可能突然出故障。",
    "天气会很快改变需求。",
    "部分数据仍然是手工收集。",
    "附近的竞争在增加。",
    "预算没有太多余地。",
    "培训新员工需要时间。",
)
ZH_STEPS = (
    "在每周例会上检查{m}。",
    "写下原因并告诉所有人。",
    "听取十位客户的意见。",
    "给{m}定一个明确的目标。",
    "准备第二个供应商。",
    "再培训两个人。",
    "和去年的数据比较。",
    "更新计划和预算。",
    "每次只试一个改变。",
)
ZH_CONCLUSIONS = (
    "总的来说，{o}这段时间的表现比较稳定，这些数据可以帮助下一步的决定。",
    "整体情况在控制之中，下一步的工作清楚而具体。",
    "这段时间既有进步，也有问题。只要稳步努力，{o}就能达到目标。",
)
EN_PLAIN = (
    "renewable energy", "electric cars", "remote work", "city traffic", "school lunches", "artificial intelligence", "public libraries", "water use",
    "online shopping", "healthy food", "space travel", "climate change", "tourism", "recycling", "small companies", "open source software",
    "solar power", "team work", "local markets", "language learning", "the history of computers", "bicycles", "housing", "music festivals",
)
ZH_PLAIN = (
    "新能源", "远程办公", "城市交通", "人工智能", "公共图书馆", "节约用水", "网上购物", "健康饮食", "气候变化", "旅游业", "垃圾分类", "开源软件", "太阳能",
    "团队合作", "语言学习", "电动汽车", "社区活动", "在线教育", "乡村发展", "共享单车",
)
