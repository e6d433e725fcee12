// tessera/launch.h through the C ABI, outside a launcher; tests/launch has the rest.
#include "tessera/launch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "tessera/error.h"

namespace {

TEST(LaunchApi, OutsideALauncherNothingIsRequestedAndErrorsGoNowhere) {
    EXPECT_EQ(tsr_preempt_requested(), 0);
    EXPECT_EQ(tsr_record_error(nullptr, nullptr), TSR_E_INVALID_ARGUMENT);
}

TEST(LaunchApi, RecordedErrorIsInTheFileThatTheEnvironmentNames) {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-error.XXXXXX").string();
    const int fd = ::mkstemp(path.data());
    ASSERT_GE(fd, 0);
    ::close(fd);
    const pid_t child = ::fork();  // one error a process
    if (child == 0) {
        ::setenv("TESSERA_ERROR_FILE", path.c_str(), 1);
        const bool well =
            tsr_record_error("loss is nan", nullptr) == TSR_OK && tsr_record_error("second", "") == TSR_OK;
        ::_exit(well ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    std::filesystem::remove(path);
    EXPECT_NE(text.str().find("loss is nan"), std::string::npos) << text.str();
    EXPECT_EQ(text.str().find("second"), std::string::npos);
}

}  // namespace
