// The corpus of every fuzz target, replayed as it stands and with random damage: nothing crashes, and what is refused is
// refused by a typed error.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz/targets.hpp"

namespace tsr::fuzz {
namespace {

std::vector<std::string> corpus_of(const std::string& name) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(TESSERA_SOURCE_DIR) + "/tests/fuzz/corpus/" + name)) {
        paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    std::vector<std::string> files;
    for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return files;
}

class Corpus : public ::testing::TestWithParam<Target> {};

TEST_P(Corpus, HoldsSoundAndUnsoundInputs) {
    int taken = 0;
    int refused = 0;
    for (const std::string& input : corpus_of(GetParam().name)) {
        (GetParam().run(input) == Outcome::taken ? taken : refused) += 1;
    }
    EXPECT_GT(taken, 0);
    EXPECT_GT(refused, 0);
}

TEST_P(Corpus, EveryTruncationIsRefused) {
    for (const std::string& input : corpus_of(GetParam().name)) {
        if (GetParam().run(input) == Outcome::refused || std::string_view(GetParam().name) == "manifest") continue;
        const size_t step = input.size() / 4000 + 1;
        for (size_t size = 0; size < input.size(); size += step) {
            ASSERT_EQ(GetParam().run(std::string_view(input).substr(0, size)), Outcome::refused)
                << size << " of " << input.size() << " bytes";
        }
    }
}

TEST_P(Corpus, RandomDamageNeverCrashes) {
    const uint32_t seed = 20261121;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<std::string> inputs = corpus_of(GetParam().name);
    for (int i = 0; i < 6000; ++i) {
        std::string input = inputs[random() % inputs.size()];
        for (uint32_t edits = 1 + random() % 4; edits > 0 && !input.empty(); --edits) {
            const size_t at = random() % input.size();
            switch (random() % 4) {
                case 0: input[at] = static_cast<char>(input[at] ^ 1 << random() % 8); break;
                case 1: input[at] = static_cast<char>(random()); break;
                case 2: input.erase(at, 1 + random() % 8); break;
                default: input.insert(at, input.substr(random() % input.size(), random() % 32));
            }
        }
        (void)GetParam().run(input);
    }
}

INSTANTIATE_TEST_SUITE_P(Fuzz, Corpus, ::testing::ValuesIn(targets),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace tsr::fuzz
