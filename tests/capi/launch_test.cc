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

// What a process leaves in its error file that does `body` and ends well; each has one error.
template <class Body>
std::string recorded_by(const Body& body) {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-error.XXXXXX").string();
    const int fd = ::mkstemp(path.data());
    EXPECT_GE(fd, 0);
    ::close(fd);
    const pid_t child = ::fork();
    if (child == 0) {
        ::setenv("TESSERA_ERROR_FILE", path.c_str(), 1);
        ::_exit(body() ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    std::filesystem::remove(path);
    return text.str();
}

TEST(LaunchApi, RecordedErrorIsInTheFileThatTheEnvironmentNames) {
    const std::string text = recorded_by(
        [] { return tsr_record_error("loss is nan", nullptr) == TSR_OK && tsr_record_error("second", "") == TSR_OK; });
    EXPECT_NE(text.find("loss is nan"), std::string::npos) << text;
    EXPECT_EQ(text.find("second"), std::string::npos);
}

TEST(LaunchApi, TheErrorThatTheMessageTellsOfIsRecordedWithItsCode) {
    const auto recorded = [](bool tells_of_it) {
        return recorded_by([&] {
            if (tsr_record_error(nullptr, nullptr) == TSR_OK) return false;
            tsr_error* taken = nullptr;  // as the bindings do
            if (tsr_error_take(&taken) != TSR_OK) return false;
            const std::string message = std::string("training: ") + tsr_error_message(taken);
            tsr_error_destroy(taken);
            return tsr_record_error(tells_of_it ? message.c_str() : "loss is nan", nullptr) == TSR_OK;
        });
    };
    EXPECT_NE(recorded(true).find("\"code\":\"INVALID_ARGUMENT\""), std::string::npos) << recorded(true);
    EXPECT_EQ(recorded(false).find("INVALID_ARGUMENT"), std::string::npos);
}

TEST(LaunchApi, AnErrorThatTheProgramFoundIsRecordedWithItsCodeAndPeer) {
    const std::string text =
        recorded_by([] { return tsr_record_error_about("late", nullptr, TSR_E_TIMEOUT, 3) == TSR_OK; });
    EXPECT_NE(text.find(R"("tessera":{"code":"TIMEOUT","rank":-1,"job_rank":-1,"peer":3,"pid":)"), std::string::npos)
        << text;
    EXPECT_EQ(tsr_record_error_about(nullptr, nullptr, TSR_E_TIMEOUT, 3), TSR_E_INVALID_ARGUMENT);
    for (const tsr_status code : {-1, 0, 10000}) {
        EXPECT_EQ(tsr_record_error_about("late", nullptr, code, 3), TSR_E_INVALID_ARGUMENT) << code;
    }
}

}  // namespace
