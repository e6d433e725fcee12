"""Computes the frozen orders of sampler_test.cc from the description in src/data/sampler.hpp, in another language."""

MASK = (1 << 64) - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class SplitMix64:
    def __init__(self, state):
        self.state = state & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mix(self.state)

    def below(self, bound):
        while True:
            product = self.next() * bound
            if product & MASK >= (1 << 64) % bound:
                return product >> 64


def order(seed, epoch, length):
    random = SplitMix64(mix((mix(seed) + epoch) & MASK))
    places = list(range(length))
    for i in range(length, 1, -1):
        j = random.below(i)
        places[i - 1], places[j] = places[j], places[i - 1]
    return places


if __name__ == "__main__":
    for seed, epoch, length in [(0, 0, 10), (7, 3, 10), (MASK, 1, 7)]:
        print(f"order({seed:#x}, {epoch}, {length}):", ", ".join(map(str, order(seed, epoch, length))))
