"""Invented names, split into training names and held-out names by a hash of the name itself.

Real first and family names ("Anna", "Miller") are ordinary words and occur in both splits; a full name made of two of
them occurs in one.
"""

import hashlib
from random import Random
from typing import Literal

JOBS = """baker carpenter teacher nurse sailor farmer tailor gardener painter librarian clockmaker miller blacksmith
pilot doctor cook plumber judge engineer architect potter weaver driver fisherman beekeeper printer musician dentist
electrician shoemaker locksmith translator surveyor chemist postman forester vet glazier mason jeweller gatekeeper
barber butcher editor photographer bookbinder lighthouse_keeper ferry_captain piano_tuner bus_driver ranger optician
actor officer accountant secretary mechanic roofer singer poet guide""".split()
FOODS = """bread pancakes soup cheese apples plums noodles rice fish carrots walnuts honey porridge dumplings pears
cherries potatoes mushrooms beans oats onion_soup apple_pie roast_chicken plum_cake lentil_stew pickled_herring
fried_eggs rye_bread goat_cheese tomato_soup barley clover hay sunflower_seeds cabbage pumpkin_pie berries raisins
sausages omelettes waffles trout mussels spinach turnips lemon_cake grilled_fish""".split()
DRINKS = """tea coffee cocoa milk apple_juice mint_tea lemonade cider ginger_beer water plum_juice black_coffee
green_tea hot_milk carrot_juice""".split()
HOBBIES = """painting fishing chess knitting sailing cycling singing rowing reading gardening dancing carving pottery
stargazing skating swimming cooking archery sketching hiking running birdwatching card_games model_trains old_maps
juggling climbing photography calligraphy""".split()
ANIMALS = """goat cat dog parrot donkey rabbit owl tortoise pony duck goose hedgehog otter raven hamster sheep pig
badger fox lizard penguin seal camel llama swan crow magpie squirrel beaver mule heron grey_goose white_mouse
barn_owl sheepdog pigeon turkey lynx bear""".split()
INSTRUMENTS = """violin piano flute drum trumpet harp cello organ clarinet guitar accordion tuba oboe banjo lute
mandolin horn bagpipe whistle viola trombone""".split()
COLOURS = """red blue green yellow white black grey brown orange purple pink silver golden crimson turquoise violet
beige dark_green light_blue dark_red pale_yellow navy ivory copper""".split()
LANGUAGES = """French Spanish German Italian Polish Greek Latin Turkish Danish Swedish Finnish Russian Arabic Hindi
Japanese Chinese Korean Welsh Irish Dutch Norwegian Hungarian Czech Portuguese""".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
GOODS = """clocks glass paper ropes lamps bells candles carpets boats maps tools shoes toys chairs soap pottery lace
knives hats barrels baskets mirrors pianos buttons kites stamps coins shells dolls masks books bicycles umbrellas
radios gloves cameras bricks pipes cheese wine salt honey ink cloth paint furniture fireworks steam_engines
wool_blankets fishing_nets old_coins wooden_toys stained_glass silver_spoons clay_jars butterflies fossils meteorites
music_boxes playing_cards copper_pots leather_bags medical_tools wild_bees sea_birds river_fish bats comets glaciers
old_songs wind_power tidal_energy pencils marbles spectacles""".split()
CARGO = """timber grain coal salt wool tea sugar oranges bananas iron cotton spices bricks marble oil fish barrels
rice copper glass wine paper pepper coffee sand slate tin tractors machine_parts olive_oil dried_fish roof_tiles
frozen_meat post mail passengers cattle flour cement""".split()
SIGHTS = """old_mill stone_bridge clock_tower castle town_hall lighthouse fountain church market_hall city_gate
glass_house windmill tall_oak observatory water_tower rose_garden iron_bridge bell_tower statue harbour_wall
old_well opera_house salt_house round_tower cave palace""".split()
PLACES = """barn garden kitchen cellar workshop library north_hall south_hall attic stable greenhouse yard boathouse
tower office bakery main_hall storeroom laboratory garage courtyard pond orchard mill east_wing west_wing basement
harbour forest meadow chapel shed corridor entrance_hall reading_room swamp valley dunes hills""".split()
FUELS = """steam gas diesel coal electricity wood water_power wind petrol oil hot_air batteries sunlight hydrogen
straw charcoal compressed_air springs""".split()
MATERIALS = """wood oak steel glass stone brick copper brass clay marble granite iron leather paper wool cotton silk
bamboo plastic tin bronze silver cork rubber sandstone aluminium concrete pine felt porcelain slate""".split()
USES = """library school hospital hotel theatre warehouse concert_hall post_office cinema station restaurant prison
youth_hostel workshop museum market_hall gallery town_hall bank court swimming_pool archive dance_hall
weather_station""".split()
SUBJECTS = """music mathematics history geography chemistry biology drawing physics sport astronomy woodwork
navigation grammar dancing botany rowing cooking weaving law medicine""".split()
TREASURES = """silver_spoon golden_mask glass_eye wooden_horse old_compass stone_lion blue_vase iron_key ivory_comb
bronze_bell paper_crown tin_soldier red_ball wool_sock copper_kettle sea_map jade_ring silver_cup music_box
giant_clock gold_coin crystal_ball leather_ball painted_plate oak_chair pocket_watch ship_model amber_necklace
rubber_duck feather old_shoe telescope""".split()
FEARS = """thunder dogs cats umbrellas water fire bicycles snakes brooms whistles wind vacuum_cleaners geese spiders
fireworks bells drums mirrors trains strangers balloons the_dark""".split()
TIMES_IN_WORDS = """one two three four five six seven eight nine ten eleven twelve""".split()
STREET_FIRST = """Mill Church Bridge Market High Station Garden River Oak Elm Castle School Park King Queen Baker
Harbour Lake Hill Forest Rose Bell Salt Canal Tower West East North South Old New Long Short Glass Smith Fisher
Orchard Meadow""".split()
STREET_LAST = "Street Street Street Road Lane Square Row Avenue Hill Walk".split()
ADJECTIVES = """Silver Golden Red Blue Green White Black Grey Brave Quiet Swift Lucky Merry Proud Bright Gentle Wild
Little Great Old Young Northern Southern Eastern Western Morning Evening Winter Summer Iron Copper Amber Crystal
Velvet Scarlet Lonely Happy Hidden Flying Singing Dancing Sleeping Wandering Restless Faithful Patient""".split()
NOUNS = """Heron Star Gull Swan Dolphin Rose Lily Arrow Anchor Falcon Eagle Otter Whale Comet Breeze Tide Wave
Lantern Compass Crown Harp Bell Dragon Lion Fox Hare Raven Sparrow Robin Swallow Thistle Willow Oak Pearl Queen
Maiden Sister Pilgrim Dawn Moon Cloud Storm River Harbour Mountain Meadow Garden Island Feather Candle Mirror Key
Door Window Clock Wheel Bridge Tower Forest Orchard Shadow Echo Promise Journey Secret Letter Song""".split()
COMPANY_LAST = """Works Tools Brothers and_Sons Foods Mills Press Textiles Motors Glass Shipping Bank Brewery
Electric Timber Pumps Foundry Instruments Systems Paper Optics Bakery Tiles Cycles""".split()
MACHINES = """press pump lathe loom oven crane saw drill mixer printer robot engine mill furnace lift sorter
generator scanner boiler conveyor compressor""".split()
PRODUCTS = """kettle lamp chair watch radio bicycle tent stove backpack camera table heater knife clock pen toaster
umbrella fan blender torch desk helmet sofa jacket boot ladder drill teapot""".split()
MUSEUMS = "Museum Museum Museum Gallery Collection".split()
BUILDINGS = "Tower Hall House Bridge Mill Castle Lighthouse Palace Church Gate Theatre".split()
SCHOOLS = "School School Academy College".split()
PLANTS = "lily rose orchid fern thistle moss oak clover iris poppy daisy violet pine willow mint sage".split()
FESTIVALS = "Festival Festival Fair Games Regatta Carnival Days".split()
FIRST_NAMES_F = """Anna Clara Emma Julia Maria Laura Nora Ruth Sarah Helen Irene Alice Martha Olga Paula Rosa Sofia
Greta Hanna Ines Karin Lena Marta Nina Petra Tess Vera Wilma Yara Amina Fatima Leila Mei Priya Aiko Zora""".split()
FIRST_NAMES_M = """Adam Paul Peter Simon Thomas Victor Walter Oscar Martin Leo Jonas Hugo Felix Emil David Carl Ben
Anton Erik Frank Georg Henry Ivan Jakob Lukas Max Nils Otto Robert Samuel Tom Omar Ravi Kenji Chen Idris""".split()
LAST_NAMES = """Miller Baker Smith Cooper Fisher Walker Turner Mason Hill Brook Stone Wood Lake Field Marsh Young
Brown White Green Black Gray Rivers Forest Winter Summers Berg Lind Holm Strand Vogel Kraft Weber Keller Novak Silva
Costa Rossi Moreau Dubois Tanaka Patel Khan Hassan Okoro Mensah Ito""".split()
FILLERS = """The roof was repaired last year.|Many people like to talk about it.|In winter it is quiet.
The weather was good that week.|Nobody knows exactly why.|There is a bench near the entrance.
The story has been told many times.|A small sign gives more details.|Most of the work is done by hand.
It is a short walk from the station.|The old records were lost in a fire.|Children often ask about this.
Guests are always welcome.|Some visitors stay the whole day.|The view is best in the early morning.
A new door was put in last spring.|Much has changed since then.|The neighbours are proud of this.
Letters arrive twice a week.|The garden is open to everyone.|This was not always so.|Everything is kept in good order.
The road there is narrow.|A photograph hangs on the wall.|There are plans for the coming year.""".replace(
    "\n", "|"
).split("|")
SYSTEMS = """Answer the question from the documents.
Use the documents to answer. Copy the words of the answer.
You answer questions with words copied from the documents.
Read the documents and answer the question.
You are a helpful assistant.
You are a careful reader. Answer briefly.
Answer with a few words from the documents.
Here are some documents. Answer the question that follows.
You are a librarian who answers questions about these texts. Keep the answer short.
Find the answer in the texts below.
Answer from the documents. Do not guess.
Below are notes from the archive. Give the shortest correct answer.
You are an assistant for a small town. Use only what the documents say.
Answer in English. Be short and exact.
The following texts are from a handbook.
Context:
Please answer the question using the text.""".split("\n")


Split = Literal["train", "held_out"]

ONSETS = """Mar Del Tor Bel Kan Lo Ren Sal Vel Dra Fen Gor Hal Jor Kel Lin Mor Nel Os Pel Quin Ros Sten Tal Ul Var Wen
Yar Zan Bri Cor Dun El Fa Gri Hol Is Ju Kra Lum""".split()
MIDDLES = "la vi ra ko mi de lo ne sa ti ru be no da".split()
PERSON_ENDS_F = "la na ra ia da sa lin wen ne tha mira ella".split()
PERSON_ENDS_M = "vin ko ren do mir tan rik los bert nar sel ford".split()
FAMILY_ENDS = "wick ley man sen over strom dale mer nov ski ard ton berg low hurst din".split()
TOWN_ENDS = "bury ford ham stad ville wick port mouth field burg by haven ton dorf minster bridge".split()
RIVER_ENDS = "a e in an er el ow une is".split()
CONSONANTS = "b c d f g h j k l m n p r s t v w x z br ch dr gr kh kl ph pr sh st th tr".split()
VOWELS = "a e i o u y ai ee ou".split()
WORD_ONSETS = "bla cro da fe gli ho ka lu me no pra qua ri ste tu vo wi ze".split()
WORD_ENDS = "ble ckle dor fin ga lsh mp nt pper rk sko tter vel x zo mel".split()
REAL_FIRST_NAMES = frozenset(FIRST_NAMES_F + FIRST_NAMES_M)
REAL_LAST_NAMES = frozenset(LAST_NAMES)


def is_held_out(stem: str) -> bool:
    """Whether a name belongs to the held-out split; about one name in eight does."""
    return hashlib.sha256(stem.lower().encode()).digest()[0] < 32


class NameSource:
    """Draws names of one split. Every stem drawn passes the hash test, so the splits never share a name."""

    def __init__(self, random: Random, split: Split) -> None:
        self.random = random
        self.split = split
        self.stems: list[str] = []  # the stems of the current prompt
        self.echoes = 0.0

    def start_prompt(self, echoes: float) -> None:
        """Forgets the stems of the last prompt; `echoes` is how often an invented stem is used again in this one."""
        self.stems = []
        self.echoes = echoes

    def _draw(self, *parts: list[str], separator: str = "") -> str:
        while True:
            stem = separator.join(self.random.choice(part) for part in parts)
            if is_held_out(stem) == (self.split == "held_out"):
                self.stems.append(stem)
                return stem

    def _invented(self, ends: list[str]) -> str:
        words_only = [stem for stem in self.stems if stem.isalpha()]
        if words_only and self.random.random() < self.echoes:
            return self.random.choice(words_only)
        drawn = self.random.random()
        if drawn < 0.1:
            rest = [VOWELS, CONSONANTS] * self.random.randint(2, 3)
            return self._draw([letters.capitalize() for letters in CONSONANTS], *rest)
        if drawn < 0.37:
            return self._draw(ONSETS, MIDDLES, ends)
        return self._draw(ONSETS, ends)

    def first_name(self, female: bool) -> str:
        """One word, such as "Marla"."""
        if self.random.random() < 0.3:
            return self.random.choice(FIRST_NAMES_F if female else FIRST_NAMES_M)
        return self._invented(PERSON_ENDS_F if female else PERSON_ENDS_M)

    def last_name(self) -> str:
        """A family name, such as "Denwick"."""
        if self.random.random() < 0.25:
            return self.random.choice(LAST_NAMES)
        return self._invented(FAMILY_ENDS)

    def person(self, female: bool | None = None) -> str:
        """First and family name."""
        if female is None:
            female = self.random.random() < 0.5
        while True:
            first, last = self.first_name(female), self.last_name()
            name = f"{first} {last}"
            if first not in REAL_FIRST_NAMES or last not in REAL_LAST_NAMES:
                return name
            if is_held_out(name) == (self.split == "held_out"):
                self.stems.append(name)
                return name

    def town(self) -> str:
        """Such as "Tolbury"."""
        return self._invented(TOWN_ENDS)

    def river(self) -> str:
        """Such as "Quinan"."""
        return self._draw(ONSETS, RIVER_ENDS)

    def word(self) -> str:
        """A lower-case word that does not exist."""
        if self.random.random() < 0.4:
            return self._draw(WORD_ONSETS, MIDDLES, WORD_ENDS)
        return self._draw(WORD_ONSETS, WORD_ENDS)

    def pair(self) -> str:
        """Two ordinary words that make a name, such as "Silver Heron"."""
        return self._draw(ADJECTIVES, NOUNS, separator=" ")

    def company(self) -> str:
        """Such as "Corlow Tools"."""
        return f"{self._invented(FAMILY_ENDS)} {self._plain(COMPANY_LAST)}"

    def machine(self) -> str:
        """Such as "the KR-20 press" or "the Lumdo crane"."""
        kind = self._plain(MACHINES)
        if self.random.random() < 0.4:
            letters = "".join(self.random.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(2))
            return f"the {self._draw([letters], ['-'], [str(n) for n in range(10, 100)])} {kind}"
        return f"the {self._invented(PERSON_ENDS_M)} {kind}"

    def product(self) -> str:
        """Such as "the Veltan kettle"."""
        return f"the {self._invented(PERSON_ENDS_M)} {self._plain(PRODUCTS)}"

    def ship(self) -> str:
        """Such as "the Silver Heron"."""
        return f"the {self.pair() if self.random.random() < 0.6 else self._invented(PERSON_ENDS_F)}"

    def museum(self) -> str:
        """Such as "the Halport Museum"."""
        stem = self.pair() if self.random.random() < 0.2 else self._invented(TOWN_ENDS)
        return f"the {stem} {self._plain(MUSEUMS)}"

    def building(self) -> str:
        """Such as "the Denwick Tower"."""
        stem = self.pair() if self.random.random() < 0.2 else self._invented(FAMILY_ENDS)
        return f"the {stem} {self._plain(BUILDINGS)}"

    def school(self) -> str:
        """Such as "Halport School"."""
        return f"{self._invented(TOWN_ENDS)} {self._plain(SCHOOLS)}"

    def book(self) -> str:
        """Such as "the book Hidden Key"."""
        return f"the book {self.pair() if self.random.random() < 0.7 else self._invented(PERSON_ENDS_F)}"

    def animal(self) -> str:
        """One first name."""
        return self.first_name(self.random.random() < 0.5)

    def plant(self) -> str:
        """Such as "the Halport lily"."""
        return f"the {self._invented(TOWN_ENDS)} {self._plain(PLANTS)}"

    def project(self) -> str:
        """Such as "Project Amber Tide"."""
        return f"Project {self.pair() if self.random.random() < 0.4 else self._invented(PERSON_ENDS_F)}"

    def festival(self) -> str:
        """Such as "the Halport Regatta"."""
        stem = self.pair() if self.random.random() < 0.3 else self._invented(TOWN_ENDS)
        return f"the {stem} {self._plain(FESTIVALS)}"

    def _plain(self, options: list[str]) -> str:
        return self.random.choice(options).replace("_", " ")
