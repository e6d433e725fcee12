// torchrun's options of `tessera run`: wrong values are refused however the option is given, and completion lists them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "command.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Result;

Result tessera_run(const std::string& arguments) { return testing::tessera(arguments, "2>&1 </dev/null", "run"); }

struct Wrong {
    std::string name;
    std::string value;  // empty: a flag
    std::string message;
    std::string more = {};       // other options
    bool by_environment = true;  // PET_NAME gives its default
};

const std::vector<Wrong> wrong_values = {
    {"nproc-per-node", "xpu", "-n: 'xpu' is not a number; expected a number, MIN:MAX, auto, cpu or gpu"},
    {"max-restarts", "x", "--max-restarts: expected a whole number, got 'x'"},
    {"monitor-interval", "x", "--monitor-interval: expected a number, got 'x'"},
    {"start-method", "thread", "--start-method: thread not in"},
    {"event-log-handler", "console", "--event-log-handler console: PyTorch's handlers of events are not available"},
    {"module", "", "--module runs a Python module; it excludes --no-python", "--no-python"},
    {"no-python", "", "--module runs a Python module; it excludes --no-python", "-m"},
    {"run-path", "", "--module runs a Python module; it excludes --run-path", "-m"},
    {"redirects", "4", "--redirects '4': '4' is not valid; expected 0 (none)"},
    {"tee", "1:9", "--tee '1:9': '1:9' is not valid"},
    {"log-line-prefix-template", "x", "--no-prefix and --log-line-prefix-template contradict", "--no-prefix"},
    {"local-ranks-filter", "0,a", "--local-ranks-filter 0,a: 'a' is not a rank"},
    {"local-ranks-filter", "1", "--local-ranks-filter names local rank 1, but the local ranks are 0 to 0"},
    {"signals-to-handle", "SIGTERM,SIGKILL", "'SIGKILL' is not SIGTERM, SIGINT"},
    {"shutdown-timeout", "soon", "--kill-grace-s: expected a number of seconds, got 'soon'"},
    {"shutdown-timeout", "-1", "--kill-grace-s -1: expected 0 to 1000000 seconds"},
    {"numa-binding", "x", "x not in", "", false},
    {"bind", "x", "x not in", "", false},
    {"logs-specs", "mine", "--logs-specs mine: Python classes for logs are not available", "", false},
    {"pass-local-rank", "rank", "--pass-local-rank: rank not in", "", false},
    {"preempted-exit-code", "256", "--preempted-exit-code", "", false},
    {"print-completion", "fish", "fish not in", "", false},
};

TEST(TorchrunOptions, WrongValuesAreRefusedInBothSpellingsAndInTheEnvironment) {
    for (const Wrong& wrong : wrong_values) {
        const auto expect_refused = [&](const std::string& words) {
            const Result result = tessera_run(words + " " + wrong.more + " true");
            EXPECT_EQ(result.code, 2) << words;
            EXPECT_THAT(result.output, HasSubstr(wrong.message)) << words;
        };
        const std::string value = wrong.value.empty() ? "" : "=" + wrong.value;
        expect_refused("--" + wrong.name + value);
        std::string other = wrong.name;
        std::ranges::replace(other, '-', '_');
        if (other != wrong.name) expect_refused("--" + other + value);
        if (!wrong.by_environment) continue;
        std::string variable = "PET_" + other;
        std::ranges::transform(variable, variable.begin(), [](unsigned char letter) { return std::toupper(letter); });
        ::setenv(variable.c_str(), wrong.value.empty() ? "1" : wrong.value.c_str(), 1);
        expect_refused("");
        ::unsetenv(variable.c_str());
    }
}

TEST(TorchrunOptions, AWrongDefaultNamesItsVariable) {
    ::setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon", 1);
    EXPECT_THAT(tessera_run("true").output,
                HasSubstr("tessera run: TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: --kill-grace-s"));
    EXPECT_EQ(testing::tessera("", "> /dev/null", "env").code, 0) << "it is a default of `tessera run` alone";
    ::setenv("PET_SHUTDOWN_TIMEOUT", "3", 1);
    EXPECT_EQ(tessera_run("true").code, 0) << "the first that is set";
    ::unsetenv("PET_SHUTDOWN_TIMEOUT");
    ::unsetenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
}

TEST(TorchrunOptions, AcceptedWithoutEffect) {
    EXPECT_EQ(
        tessera_run("--start-method forkserver --monitor-interval 5 --event-log-handler null --logs-specs default "
                    "--standalone --nnodes=1 true")
            .code,
        0);
}

TEST(TorchrunOptions, HelpListsOneSpelling) {
    EXPECT_THAT(tessera_run("--help").output,
                AllOf(HasSubstr("--log-dir"), HasSubstr("-t,--tee"), Not(HasSubstr("_dir"))));
}

TEST(TorchrunOptions, CompletionListsTheOptions) {
    const std::string complete =
        " > completion.$$ && bash -c '. ./completion.$1; COMP_WORDS=(tessera \"$2\" \"$3\"); COMP_CWORD=2; "
        "_tessera_run; "
        "echo \"[${COMPREPLY[*]}]\"' - $$ ";
    const std::string clean = "; rm completion.$$";
    EXPECT_EQ(testing::tessera("--print-completion bash", complete + "run --te" + clean, "run").output, "[--tee]\n");
    EXPECT_EQ(testing::tessera("--print-completion bash", complete + "run /tm" + clean, "run").output, "[]\n");
    EXPECT_EQ(testing::tessera("--print-completion bash", complete + "ckpt --te" + clean, "run").output, "[]\n");
    EXPECT_THAT(tessera_run("--print_completion=zsh").output, HasSubstr("bashcompinit\n_tessera_run() {"));
    EXPECT_THAT(tessera_run("--print-completion tcsh").output,
                AllOf(HasSubstr("complete tessera 'c/--/("), HasSubstr(" log-dir ")));
}

}  // namespace
}  // namespace tsr
