(function () {
  "use strict";
  var root = document.documentElement;

  // light or dark: the system's choice, until the button is pressed
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var button = document.querySelector(".theme");
  function isDark() { return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches; }
  function name() { button.textContent = isDark() ? "Light" : "Dark"; }
  button.hidden = false;
  button.addEventListener("click", function () { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();

  document.querySelectorAll(".views input").forEach(function (input) {
    input.addEventListener("change", function () { root.dataset.view = input.value; });
  });

  document.querySelectorAll(".shot").forEach(function (shot) {
    var slider = shot.querySelector("input[type=range]");
    var play = shot.querySelector("button");
    var tiles = shot.querySelectorAll(".blocks figure");
    var big = shot.querySelectorAll(".now .over");
    var output = shot.querySelector("output");
    var meter = shot.querySelector(".meter i");
    var timer = 0;
    function show() {
      var tile = tiles[slider.value - 1];
      tile.querySelectorAll(".over").forEach(function (frame, i) { big[i].src = frame.src; });
      output.textContent = tile.dataset.text;
      shot.querySelector(".now").setAttribute("aria-label", tile.dataset.text);
      slider.setAttribute("aria-valuetext", tile.dataset.text);
      meter.style.width = tile.dataset.share + "%";
    }
    function stop() {
      window.clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
    }
    slider.addEventListener("input", function () { stop(); show(); });
    play.addEventListener("click", function () {
      if (timer) { stop(); return; }
      if (slider.value === slider.max) { slider.value = slider.min; }
      play.textContent = "Stop";
      show();
      timer = window.setInterval(function () {
        slider.value = Number(slider.value) + 1;
        show();
        if (slider.value === slider.max) { stop(); }
      }, 450);
    });
    shot.querySelector(".scrub").hidden = false;
    show();
  });
})();
