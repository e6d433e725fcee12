// A configuration is its text or the path of its file.
#include "engine/config_file.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/error.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

Error refusal_of(const std::string& text_or_path) {
    try {
        (void)config_text_of(text_or_path);
    } catch (const Error& error) {
        return error;
    }
    ADD_FAILURE() << "nothing was thrown for " << text_or_path;
    return Error(Code::ok, "");
}

TEST(ConfigFile, TextIsNotRead) {
    for (const std::string text : {"", "{}", "// a comment\n{}", "[]", "/no/such/file{"})
        EXPECT_EQ(config_text_of(text), text);
}

TEST(ConfigFile, AFileIsReadWhole) {
    const testing::TemporaryDirectory dir;
    const std::string path = dir.path().string() + "/ds_config.json";
    const std::string text("{\"a\": \"\0\"}", 10);
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_EQ(config_text_of(path), text);
}

TEST(ConfigFile, WhatCannotBeReadIsNamed) {
    const testing::TemporaryDirectory dir;
    const Error missing = refusal_of(dir.path().string() + "/none.json");
    EXPECT_EQ(missing.code(), Code::not_found);
    EXPECT_NE(
        std::string(missing.what()).find("the configuration " + dir.path().string() + "/none.json cannot be read"),
        std::string::npos)
        << missing.what();
    EXPECT_EQ(refusal_of(dir.path().string()).code(), Code::io);
}

TEST(ConfigFile, LargeFilesAreRefused) {
    const testing::TemporaryDirectory dir;
    const std::string path = dir.path().string() + "/large.json";
    std::ofstream(path) << std::string(300'000, ' ');
    EXPECT_EQ(refusal_of(path).code(), Code::invalid_argument);
}

TEST(ConfigFile, LongTextWithoutABraceIsCut) {
    const Error error = refusal_of(std::string(250'000, 'x'));
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_LT(std::string(error.what()).size(), 300);
}

}  // namespace
}  // namespace tsr
