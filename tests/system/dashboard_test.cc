// The dashboard in Debian's Chromium: what it shows of real and made-up requests, in both themes
// and at two widths, and that nothing a client sends becomes markup.
//
// CERTKV_SCREENSHOTS=docs/dashboard keeps the screenshots.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "services/common/convert.h"
#include "tests/support/browser.h"
#include "tests/support/file_content.h"
#include "tests/support/http_client.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kEvilLabel[] = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>";

class DashboardTest : public SystemTest {
 protected:
  void Start(const std::string& server_yaml = "") {
    port_ = FreePort();
    StartCluster(absl::StrCat("server:\n  http_address: 127.0.0.1:", port_, "\n", server_yaml,
                              "gate:\n  risk_mode: cumulative\n  cumulative_budget: 4000\n"
                              "  budget_slice_share: 0.25\n  tenant_budget: 20000\n"));
    stub_ = gate::v1::Gate::NewStub(client::MakeChannel(cluster_->options().gate_target));
  }
  std::string Url(const std::string& rest = "") const {
    return absl::StrCat("http://127.0.0.1:", port_, "/", rest);
  }
  // Runs the browser until the page has been quiet; what it prints.
  std::string Browse(const std::string& url, const std::string& flags) {
    const std::string out = cluster_->directory() + "/browser.out";
    const std::string command = absl::StrCat(
        kBrowser, " --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000 ",
        "--user-data-dir=", cluster_->directory(), "/browser ", flags, " '", url, "' > ", out,
        " 2>/dev/null");
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return ContentOf(out);
  }
  std::string Dom(const std::string& url) { return Browse(url, "--dump-dom"); }
  void Screenshot(const std::string& url, const std::string& name, int width, int height) {
    const std::string path = absl::StrCat(cluster_->directory(), "/", name, ".png");
    Browse(url, absl::StrCat("--screenshot=", path, " --window-size=", width, ",", height));
    EXPECT_GT(std::filesystem::exists(path) ? std::filesystem::file_size(path) : 0, 20'000u)
        << name;
    if (const char* keep = std::getenv("CERTKV_SCREENSHOTS")) {
      std::filesystem::create_directories(keep);
      std::filesystem::copy_file(path, absl::StrCat(keep, "/", name, ".png"),
                                 std::filesystem::copy_options::overwrite_existing);
    }
  }

  // A request whose reports are made up: a model of 12 layers and 16 heads.
  void MakeUp(const std::string& id, const std::string& label, double scale, int batches,
              absl::Duration pause = absl::ZeroDuration()) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    gate::v1::OpenRequestRequest open;
    gate::v1::OpenRequestResponse opened;
    open.set_request_id(id);
    open.set_label(label);
    open.set_tenant("acme");
    open.set_model("demo-1b");
    const grpc::Status status = stub_->OpenRequest(&context, open, &opened);
    ASSERT_TRUE(status.ok()) << status.error_message();
    grpc::ClientContext stream_context;
    const auto stream = stub_->Report(&stream_context);
    for (int batch = 1; batch <= batches; ++batch) {
      gate::v1::ReportRequest report;
      report.set_request(opened.lease().request());
      report.set_reporter_id(1);
      report.set_batch_number(batch);
      report.set_lease_id(opened.lease().lease_id());
      for (int layer = 0; layer < 12; ++layer) {
        for (int head = 0; head < 16; ++head) {
          *report.add_certificates() = MadeUpRead(layer, head, batch, scale);
        }
      }
      gate::v1::ReportResponse response;
      ASSERT_TRUE(stream->Write(report) && stream->Read(&response));
      absl::SleepFor(pause);
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  type::Certificate MadeUpRead(int layer, int head, int step, double scale) {
    std::lognormal_distribution<double> spread(0, 0.5);
    const double shape = 0.3 + std::abs(std::sin(0.7 * layer + 1.3 * head)) + 0.05 * layer;
    const auto first = static_cast<float>(std::min(0.95, scale * shape * spread(random_)));
    ReadCertificate read;
    read.layer = layer;
    read.query_head = head;
    read.query_position = 1000 + step;
    read.first_worst_case_tv = first;
    read.worst_case_tv = first;
    read.value_radius = 1;
    read.outcome = Outcome::kCertified;
    read.key_format = static_cast<uint8_t>(layer < 10 ? KeyFormat::kK8 : KeyFormat::kK6);
    read.value_format = static_cast<uint8_t>(ValueFormat::kV4);
    if (first > 0.2f) {
      read.worst_case_tv = 0.15f;
      read.rung = first > 0.6f ? Rung::kHead : first > 0.3f ? Rung::kKeys : Rung::kValues;
      read.repair_bytes = 1 << 16;
    }
    return ReadCertificateToProto(read);
  }
  void ReadForReal(const std::string& id) {
    const TestSequence data(SmallSpec(), 64 * 6 + 10, 7);
    const auto worker = AttachWorker(SmallSpec());
    const auto sequence = Put(*worker, data);
    const auto request = OpenRequest(id, 0.02f);
    const auto attention = client::Attention::Open(*worker, *sequence, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    for (uint32_t seed = 1; seed <= 4; ++seed) {
      tolerances_.tv_tolerance = 0.02f;
      ReadAndCheck(**attention, data, sequence->token_count(), seed);
    }
    ASSERT_TRUE(request->Flush().ok());
  }

  std::mt19937 random_{20};  // always the same picture
  uint16_t port_ = 0;
  std::unique_ptr<gate::v1::Gate::Stub> stub_;
};

TEST_P(DashboardTest, ShowsRequestsHeadsTiersAndCoverage) {
  if (!std::filesystem::exists(kBrowser)) GTEST_SKIP() << "needs Debian's chromium-headless-shell";
  Start();
  ReadForReal("real-read");
  for (int i = 0; i < 11; ++i) {
    MakeUp(absl::StrCat("decode-", 100 + i), absl::StrCat("chat of worker ", i % 3),
           0.004 * (1 + i * i / 3.0), 3);
  }
  MakeUp("escape", kEvilLabel, 0.02, 1);
  // Steps of the timeline are a quarter of a second.
  MakeUp("decode-111", "long answer", 0.035, 24, absl::Milliseconds(90));
  ASSERT_TRUE(HttpGet(port_, "/api/overview").status == 200);  // the store is asked now

  const std::string page = Dom(Url());
  EXPECT_THAT(page, HasSubstr("class=\"state live\""));
  EXPECT_THAT(page, HasSubstr("decode-111"));
  EXPECT_THAT(page, HasSubstr("Certified at first read"));
  EXPECT_THAT(page, HasSubstr("K8V4"));  // coverage by format
  EXPECT_THAT(page, HasSubstr("K6V4"));
  EXPECT_THAT(page, HasSubstr("Quantized"));  // tiers
  EXPECT_THAT(page, HasSubstr("Tenant acme"));
  // Text stays text.
  EXPECT_THAT(page, HasSubstr("&lt;img src=x onerror="));
  EXPECT_THAT(page, Not(HasSubstr("<b>bold</b>")));
  EXPECT_THAT(page, HasSubstr("<title>CertKV gate</title>"));

  const std::string detail = Dom(Url("#/request/decode-111"));
  EXPECT_THAT(detail, HasSubstr("id=\"heat\""));
  EXPECT_THAT(detail, HasSubstr("data-layer=\"11\" data-head=\"15\""));
  EXPECT_THAT(detail, HasSubstr("id=\"timeline\""));
  EXPECT_THAT(detail, HasSubstr("id=\"worst\""));
  EXPECT_THAT(detail, HasSubstr("aria-selected=\"true\""));

  // An id that is markup is an error of gate, told as text.
  const std::string evil = Dom(Url("#/request/%3Cimg%20src%3Dx%3E"));
  EXPECT_THAT(evil, HasSubstr("REQUEST_NAME_INVALID"));
  EXPECT_THAT(evil, HasSubstr("&lt;img src=x&gt;"));
  EXPECT_THAT(evil, Not(HasSubstr("<img src=\"x\"")));

  Screenshot(Url("?theme=light#/request/decode-111"), "light-1280", 1280, 1500);
  Screenshot(Url("?theme=dark#/request/decode-111"), "dark-1280", 1280, 1500);
  Screenshot(Url("?theme=light#/request/decode-111"), "light-390", 390, 3000);
  Screenshot(Url("?theme=dark#/request/decode-111"), "dark-390", 390, 3000);
}

TEST_P(DashboardTest, KeysMoveOpenAndClose) {
  if (!std::filesystem::exists(kBrowser)) GTEST_SKIP() << "needs Debian's chromium-headless-shell";
  Start();
  MakeUp("low", "first", 0.01, 1);
  MakeUp("high", "second", 0.3, 1);
  Browser browser;
  browser.Open(Url("?theme=light"));
  ASSERT_TRUE(browser.WaitFor("document.querySelectorAll('tr[data-name]').length === 2"));
  const auto focused = [&] { return browser.Evaluate("document.activeElement.dataset.name"); };
  browser.Press("Tab");
  EXPECT_EQ(browser.Evaluate("document.activeElement.className"), "skip") << "the first stop";
  browser.Press("j");
  EXPECT_EQ(focused(), "requests/high") << "the riskiest";
  browser.Press("j");
  EXPECT_EQ(focused(), "requests/low");
  browser.Press("j");
  EXPECT_EQ(focused(), "requests/low") << "the last";
  browser.Press("k");
  EXPECT_EQ(focused(), "requests/high");
  browser.Press("Enter");
  EXPECT_TRUE(browser.WaitFor("location.hash === '#/request/high'"));
  ASSERT_TRUE(browser.WaitFor("document.querySelector('#heat .cell') !== null"));
  // The heat map is one stop; arrows move in it.
  EXPECT_EQ(browser.Evaluate("document.querySelectorAll('#heat .cell[tabindex=\"0\"]').length"), 1);
  browser.Evaluate("document.querySelector('#heat .cell[tabindex=\"0\"]').focus()");
  const auto cell = [&] {
    return browser.Evaluate(
        "document.activeElement.dataset.layer + ' ' + document.activeElement.dataset.head");
  };
  EXPECT_EQ(cell(), "0 0");
  browser.Press("ArrowRight");
  browser.Press("ArrowDown");
  EXPECT_EQ(cell(), "1 1");
  browser.Press("Escape");
  EXPECT_TRUE(browser.WaitFor("location.hash === ''"));
  EXPECT_TRUE(browser.WaitFor("document.querySelector('#heat') === null"));
  browser.Press("t");
  EXPECT_EQ(browser.Evaluate("document.documentElement.dataset.theme"), "dark");
  // What is typed into a field is no command.
  browser.Evaluate("document.getElementById('label').focus()");
  browser.Press("t");
  EXPECT_EQ(browser.Evaluate("document.documentElement.dataset.theme"), "dark");
  EXPECT_EQ(browser.Evaluate("document.getElementById('label').value"), "t");
}

// The least contrast of any text that is shown, as WCAG defines it, and that text.
constexpr char kLeastContrast[] = R"js((() => {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let least = [21, "", 100];
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3)
      .map((n) => n.data.trim()).join("");
    const style = getComputedStyle(element);
    if (!text || !element.checkVisibility() || element.matches(".skip, :disabled")) continue;
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(numbers(color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least[0]) least = [contrast, text + " " + color, least[2]];
    least[2] = Math.min(least[2], parseFloat(style.fontSize));
  }
  return least;
})())js";

TEST_P(DashboardTest, IsReadableInBothThemesAtBothWidths) {
  if (!std::filesystem::exists(kBrowser)) GTEST_SKIP() << "needs Debian's chromium-headless-shell";
  Start();
  MakeUp("decode-1", "a label that is rather long for a narrow screen", 0.05, 3);
  Browser browser;
  for (const std::string theme : {"light", "dark"}) {
    for (const int width : {1280, 390}) {
      const std::string what = absl::StrCat(theme, " at ", width, " px");
      browser.Resize(width, 1500);
      browser.Open(Url(absl::StrCat("?theme=", theme, "#/request/decode-1")));
      ASSERT_TRUE(browser.WaitFor(absl::StrCat(
          "document.documentElement.dataset.theme === '", theme, "' && innerWidth === ", width,
          " && document.querySelector('#heat .cell') !== null")))
          << what;
      EXPECT_LE(browser.Evaluate("document.documentElement.scrollWidth"), width) << what;
      EXPECT_EQ(browser.Evaluate("document.querySelectorAll('#heat .cell').length"), 192) << what;
      EXPECT_EQ(browser.Evaluate("document.getElementById('timeline') !== null"), true) << what;
      const nlohmann::json least = browser.Evaluate(kLeastContrast);
      EXPECT_GE(least[0], 4.5) << what << ": " << least[1];
      EXPECT_GE(least[2], 11) << what << ": px of the smallest text";
    }
  }
}

TEST_P(DashboardTest, AnswersInJsonAndRefusesWhatIsWrong) {
  Start();
  MakeUp("one", "first", 0.1, 1);
  MakeUp("two", "second", 0.3, 1);
  const auto list = nlohmann::json::parse(HttpGet(port_, "/api/requests?page_size=1").body);
  ASSERT_EQ(list["requests"].size(), 1u);
  EXPECT_EQ(list["requests"][0]["name"], "requests/two");
  EXPECT_EQ(list["request_count"], 2);
  const auto next = nlohmann::json::parse(HttpGet(port_, "/api/requests?page_size=1&page_token=" +
                                                             PercentEncode(list["next_page_token"]))
                                              .body);
  EXPECT_EQ(next["requests"][0]["name"], "requests/one");
  const auto one = nlohmann::json::parse(HttpGet(port_, "/api/requests/one").body);
  EXPECT_EQ(one["heads"].size(), 192u);
  EXPECT_EQ(one["timeline"]["buckets"][0]["reads"], 192);
  EXPECT_EQ(HttpGet(port_, "/api/requests/none").status, 404);
  EXPECT_EQ(HttpGet(port_, "/api/requests?page_size=x").status, 400);
  EXPECT_EQ(HttpGet(port_, "/api/requests?page_token=x").status, 400);
  EXPECT_EQ(HttpGet(port_, "/api/nothing").status, 404);
  EXPECT_THAT(HttpGet(port_, "/").head, HasSubstr("script-src 'self'"));
}

TEST_P(DashboardTest, AsksForTheTokenWhereThereIsOne) {
  if (!std::filesystem::exists(kBrowser)) GTEST_SKIP() << "needs Debian's chromium-headless-shell";
  char path[] = "/tmp/certkv-token-XXXXXX";
  const int file = mkstemp(path);
  ASSERT_GE(file, 0);
  ASSERT_EQ(write(file, "a-token-of-this-test", 20), 20);
  close(file);
  Start(absl::StrCat("  http_token_file: ", path, "\n"));
  MakeUp("secret-request", "first", 0.1, 1);
  EXPECT_EQ(HttpGet(port_, "/api/requests").status, 401);
  EXPECT_EQ(HttpGet(port_, "/metrics").status, 401);
  EXPECT_EQ(
      HttpGet(port_, "/api/requests", "Authorization: Bearer a-token-of-this-test\r\n").status,
      200);
  Browser browser;
  browser.Open(Url());
  ASSERT_TRUE(browser.WaitFor("document.getElementById('state').textContent === 'locked'"));
  const std::string shown = "!document.getElementById('login').hidden";
  EXPECT_EQ(browser.Evaluate(shown), true);
  EXPECT_EQ(browser.Evaluate("document.getElementById('main').hidden"), true);
  const std::string text = "document.body.textContent.includes('secret-request')";
  EXPECT_EQ(browser.Evaluate(text), false);
  const auto enter = [&](const std::string& token) {
    browser.Evaluate("{const t = document.getElementById('token'); t.value = ''; t.focus()}");
    browser.Type(token);
    browser.Press("Enter");
  };
  enter("not-the-token-of-this-test");
  EXPECT_TRUE(browser.WaitFor(
      "document.getElementById('login-error').textContent === 'Gate does not take this token'"));
  EXPECT_EQ(browser.Evaluate(text), false);
  enter("a-token-of-this-test");
  EXPECT_TRUE(browser.WaitFor(text));
  EXPECT_EQ(browser.Evaluate(shown), false);
  // It lasts as long as the tab, and is nowhere else.
  browser.Open(Url("?theme=dark"));
  EXPECT_TRUE(browser.WaitFor("document.documentElement.dataset.theme === 'dark' && " + text));
  EXPECT_EQ(browser.Evaluate("JSON.stringify(localStorage).includes('a-token') || "
                             "document.cookie.includes('a-token') || "
                             "location.href.includes('a-token')"),
            false);
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DashboardTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
